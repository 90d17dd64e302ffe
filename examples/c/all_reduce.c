/*
 * Three processes seal a message each, check each other's tags, and add up a vector by a sealed all-reduce.
 *
 *     cargo build --release -p ringseal-capi
 *     cc -Iinclude examples/c/all_reduce.c -o all_reduce -Ltarget/release -lringseal_c
 *     LD_LIBRARY_PATH=target/release ./all_reduce
 *
 * The processes find each other through memory that they share; with MPI, the gather function would be one call of
 * MPI_Allgather.
 */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ringseal.h"

enum { RANKS = 3, COUNT = 100000, ROUNDS = 8 };

/* What every rank has said in every round. Each round is used once. */
struct board {
    int present[ROUNDS][RANKS];
    uint8_t said[ROUNDS][RANKS][RINGSEAL_GATHER_BYTES];
};

struct seat {
    struct board *board;
    int rank, round;
};

static int32_t gather(void *user, const uint8_t *message, size_t bytes, uint8_t *gathered, uint64_t timeout_ms) {
    struct seat *seat = user;
    struct board *board = seat->board;
    int round = seat->round++;
    if (round == ROUNDS || bytes != RINGSEAL_GATHER_BYTES) return 1;
    memcpy(board->said[round][seat->rank], message, bytes);
    __atomic_store_n(&board->present[round][seat->rank], 1, __ATOMIC_RELEASE);
    for (int rank = 0; rank < RANKS; rank++) {
        for (uint64_t waited = 0; !__atomic_load_n(&board->present[round][rank], __ATOMIC_ACQUIRE); waited++) {
            if (waited == timeout_ms) return 2;
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        memcpy(gathered + rank * bytes, board->said[round][rank], bytes);
    }
    return 0;
}

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

static void run(struct board *board, const uint8_t *secret, int rank) {
    struct seat seat = {.board = board, .rank = rank};
    ringseal_options options = {.struct_bytes = sizeof options, .timeout_ms = 20000};
    ringseal_communicator *communicator;
    check(ringseal_communicator_create(secret, rank, RANKS, &options, gather, &seat, &communicator));

    float *vector = malloc(COUNT * sizeof *vector);
    for (int i = 0; i < COUNT; i++) vector[i] = (float)(rank + 1) * (float)(i % 100);
    check(ringseal_all_reduce(communicator, vector, vector, COUNT, RINGSEAL_DTYPE_F32, RINGSEAL_OP_SUM));
    for (int i = 0; i < COUNT; i++) {
        if (vector[i] != 6.0f * (float)(i % 100)) {
            fprintf(stderr, "rank %d: element %d is wrong\n", rank, i);
            exit(1);
        }
    }
    printf("rank %d: %d sums are right\n", rank, COUNT);
    free(vector);
    ringseal_communicator_destroy(communicator);
}

int main(void) {
    if (ringseal_abi_version() != RINGSEAL_ABI_VERSION) return 1;
    seal_and_open();

    struct board *board =
        mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED) return 1;
    /* Between machines it comes from attestation. */
    uint8_t secret[RINGSEAL_SECRET_BYTES];
    if (getentropy(secret, sizeof secret) != 0) return 1;
    for (int rank = 0; rank < RANKS; rank++) {
        pid_t child = fork();
        if (child < 0) return 1;
        if (child == 0) {
            run(board, secret, rank);
            return 0;
        }
    }
    int failed = 0, status;
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}
