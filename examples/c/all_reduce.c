/*
 * Three processes seal a message each, check each other's tags, and add up a vector by a sealed all-reduce.
 *
 *     cargo build --release -p ringseal-capi
 *     cc -Iinclude examples/c/all_reduce.c -o all_reduce -Ltarget/release -lringseal_c
 *     LD_LIBRARY_PATH=target/release ./all_reduce
 *
 * The processes find each other through memory that they share: board.h.
 */
#define _DEFAULT_SOURCE
#include <stdlib.h>

#include "board.h"

enum { RANKS = 3, COUNT = 100000 };

static void check(ringseal_status status) {
    if (status != RINGSEAL_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", ringseal_status_name(status), ringseal_last_error());
        exit(1);
    }
}

static void seal_and_open(void) {
    const uint8_t key[32] = {7}, nonce[12] = {1};
    uint8_t text[] = "a gradient", tag[RINGSEAL_TAG_BYTES];
    ringseal_aead *aead;
    check(ringseal_aead_create(key, sizeof key, NULL, &aead));
    check(ringseal_seal(aead, nonce, sizeof nonce, NULL, 0, text, text, sizeof text, tag));
    check(ringseal_open(aead, nonce, sizeof nonce, NULL, 0, text, text, sizeof text, tag, sizeof tag));
    if (strcmp((char *)text, "a gradient") != 0) exit(1);
    ringseal_aead_destroy(aead);
}

static int run(struct seat *seat, const uint8_t *secret) {
    ringseal_options options = {.struct_bytes = sizeof options, .timeout_ms = 20000};
    ringseal_communicator *communicator;
    check(ringseal_communicator_create(secret, seat->rank, RANKS, &options, gather, seat, &communicator));

    float *vector = malloc(COUNT * sizeof *vector);
    for (int i = 0; i < COUNT; i++) vector[i] = (float)(seat->rank + 1) * (float)(i % 100);
    check(ringseal_all_reduce(communicator, vector, vector, COUNT, RINGSEAL_DTYPE_F32, RINGSEAL_OP_SUM));
    for (int i = 0; i < COUNT; i++) {
        if (vector[i] != 6.0f * (float)(i % 100)) {
            fprintf(stderr, "rank %d: element %d is wrong\n", seat->rank, i);
            return 1;
        }
    }
    printf("rank %d: %d sums are right\n", seat->rank, COUNT);
    free(vector);
    ringseal_communicator_destroy(communicator);
    return 0;
}

int main(void) {
    if (ringseal_abi_version() != RINGSEAL_ABI_VERSION) return 1;
    seal_and_open();
    return fork_ranks(RANKS, run);
}
