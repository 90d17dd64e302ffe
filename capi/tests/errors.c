/* Wrong calls get a status and a message, whatever is wrong about them; right ones in a group of threads work. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ringseal.h"

static int checks;

#define CHECK(condition)                                                       \
    do {                                                                       \
        __atomic_fetch_add(&checks, 1, __ATOMIC_RELAXED);                      \
        if (!(condition)) {                                                    \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, \
                    ringseal_last_error());                                    \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

/* The call fails so, and says why. */
#define FAILS(status, call)                                                    \
    do {                                                                       \
        CHECK((call) == RINGSEAL_STATUS_##status);                             \
        CHECK(strlen(ringseal_last_error()) > 5);                              \
    } while (0)

#define WORKS(call)                                                            \
    do {                                                                       \
        CHECK((call) == RINGSEAL_STATUS_OK);                                   \
        CHECK(strlen(ringseal_last_error()) == 0);                             \
    } while (0)

/* NIST CAVP gcmEncryptExtIV128: key 0, IV 0, no text (GCM specification, test case 1) and 16 zeros (test case 2). */
static const uint8_t CASE1_TAG[16] = {0x58, 0xe2, 0xfc, 0xce, 0xfa, 0x7e, 0x30, 0x61,
                                      0x36, 0x7f, 0x1d, 0x57, 0xa4, 0xe7, 0x45, 0x5a};
static const uint8_t CASE2_TEXT[16] = {0x03, 0x88, 0xda, 0xce, 0x60, 0xb6, 0xa3, 0x92,
                                       0xf3, 0x28, 0xc2, 0xb9, 0x71, 0xb2, 0xfe, 0x78};
static const uint8_t CASE2_TAG[16] = {0xab, 0x6e, 0x47, 0xd4, 0x2c, 0xec, 0x13, 0xbd,
                                      0xf5, 0x3a, 0x67, 0xb2, 0x12, 0x57, 0xbd, 0xdf};

static void aead(void) {
    const uint8_t zeros[32] = {0}, iv[12] = {0};
    uint8_t text[64] = {0}, out[64], tag[16];
    ringseal_aead *aead = (ringseal_aead *)1;
    FAILS(INVALID_ARGUMENT, ringseal_aead_create(NULL, 16, NULL, &aead));
    CHECK(aead == NULL);
    FAILS(LENGTH, ringseal_aead_create(zeros, 0, NULL, &aead));
    FAILS(LENGTH, ringseal_aead_create(zeros, 15, NULL, &aead));
    FAILS(INVALID_ARGUMENT, ringseal_aead_create(zeros, SIZE_MAX, NULL, &aead));
    FAILS(INVALID_ARGUMENT, ringseal_aead_create(zeros, 16, "tpu", &aead));
    FAILS(INVALID_ARGUMENT, ringseal_aead_create(zeros, 16, "\xff", &aead));
    FAILS(INVALID_ARGUMENT, ringseal_aead_create(zeros, 16, NULL, NULL));
    CHECK(strstr(ringseal_last_error(), "out"));
    WORKS(ringseal_aead_create(zeros, 16, "cpu", &aead));

    WORKS(ringseal_gmac(aead, iv, 12, NULL, 0, tag));
    CHECK(memcmp(tag, CASE1_TAG, 16) == 0);
    WORKS(ringseal_gmac_verify(aead, iv, 12, NULL, 0, tag, 16));
    FAILS(AUTHENTICATION, ringseal_gmac_verify(aead, iv, 12, zeros, 1, tag, 16));
    WORKS(ringseal_seal(aead, iv, 12, NULL, 0, text, out, 16, tag));
    CHECK(memcmp(out, CASE2_TEXT, 16) == 0 && memcmp(tag, CASE2_TAG, 16) == 0);
    WORKS(ringseal_open(aead, iv, 12, NULL, 0, out, text, 16, tag, 16));
    CHECK(memcmp(text, zeros, 16) == 0);

    FAILS(LENGTH, ringseal_open(aead, iv, 12, NULL, 0, out, text, 16, tag, 12));
    FAILS(LENGTH, ringseal_seal(aead, iv, 0, NULL, 0, text, out, 16, tag));
    FAILS(INVALID_ARGUMENT, ringseal_seal(NULL, iv, 12, NULL, 0, text, out, 16, tag));
    FAILS(INVALID_ARGUMENT, ringseal_seal(aead, NULL, 12, NULL, 0, text, out, 16, tag));
    FAILS(INVALID_ARGUMENT, ringseal_seal(aead, iv, 12, NULL, 1, text, out, 16, tag));
    FAILS(INVALID_ARGUMENT, ringseal_seal(aead, iv, 12, NULL, 0, NULL, out, 16, tag));
    FAILS(INVALID_ARGUMENT, ringseal_seal(aead, iv, 12, NULL, 0, text, NULL, 16, tag));
    FAILS(INVALID_ARGUMENT, ringseal_seal(aead, iv, 12, NULL, 0, text, out, 16, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_seal(aead, iv, 12, NULL, 0, text, out, SIZE_MAX, tag));
    FAILS(INVALID_ARGUMENT, ringseal_seal(aead, iv, 12, NULL, 0, text, text + 1, 16, tag));
    FAILS(INVALID_ARGUMENT, ringseal_open(aead, iv, 12, NULL, 0, NULL, text, 16, tag, 16));
    FAILS(INVALID_ARGUMENT, ringseal_open(aead, iv, 12, NULL, 0, out, text, 16, NULL, 16));

    memset(text, 0xaa, sizeof text);
    tag[3] ^= 1;
    FAILS(AUTHENTICATION, ringseal_open(aead, iv, 12, NULL, 0, out, text, 16, tag, 16));
    CHECK(memcmp(text, zeros, 16) == 0 && text[16] == 0xaa);
    /* Cleaning up keeps the message. */
    ringseal_aead_destroy(aead);
    CHECK(strlen(ringseal_last_error()) > 5);
    ringseal_aead_destroy(NULL);
}

static int32_t refuse(void *user, const uint8_t *message, size_t bytes, uint8_t *gathered, uint64_t timeout_ms) {
    (void)message, (void)gathered, (void)timeout_ms;
    CHECK(bytes == RINGSEAL_GATHER_BYTES);
    return *(int *)user;
}

static int32_t only_me(void *user, const uint8_t *message, size_t bytes, uint8_t *gathered, uint64_t timeout_ms) {
    (void)user, (void)timeout_ms;
    memcpy(gathered, message, bytes);
    return 0;
}

static int32_t nonsense(void *user, const uint8_t *message, size_t bytes, uint8_t *gathered, uint64_t timeout_ms) {
    (void)user, (void)message, (void)timeout_ms;
    memset(gathered, 0xff, bytes);
    return 0;
}

static void creation(void) {
    const uint8_t secret[RINGSEAL_SECRET_BYTES] = {3};
    ringseal_options options = {.struct_bytes = sizeof options, .timeout_ms = 50};
    ringseal_communicator *alone = (ringseal_communicator *)1, *two[2];
    int seven = 7;
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(NULL, 0, 1, NULL, only_me, NULL, &alone));
    CHECK(alone == NULL);
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 0, 1, NULL, NULL, NULL, &alone));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 0, 0, NULL, only_me, NULL, &alone));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 0, SIZE_MAX, NULL, only_me, NULL, &alone));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 1, 1, NULL, only_me, NULL, &alone));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 0, 1, NULL, only_me, NULL, NULL));
    FAILS(HANDSHAKE, ringseal_communicator_create(secret, 0, 2, NULL, refuse, &seven, &alone));
    CHECK(strstr(ringseal_last_error(), "7"));
    FAILS(HANDSHAKE, ringseal_communicator_create(secret, 0, 1, NULL, nonsense, NULL, &alone));
    options.struct_bytes--;
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_group(secret, 2, &options, two));
    options.struct_bytes++;
    options.protection = 3;
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_group(secret, 2, &options, two));
    options.protection = RINGSEAL_PROTECTION_AES128_GCM;
    options.schedule = 6;
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_group(secret, 2, &options, two));
    options.schedule = RINGSEAL_SCHEDULE_EXCHANGE;
    options.record_bytes = 17;
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_group(secret, 2, &options, two));
    options.record_bytes = 4096;
    options.host = "nowhere";
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_group(secret, 2, &options, two));
    options.host = "0.0.0.0";
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 0, 1, &options, only_me, NULL, &alone));
    options.host = NULL;
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_rendezvous(secret, 0, 2, &options, NULL, &alone));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_rendezvous(secret, 0, 2, &options, "nowhere", &alone));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_rendezvous(secret, 2, 2, &options, "127.0.0.1:1", &alone));
    FAILS(HANDSHAKE, ringseal_communicator_create_rendezvous(secret, 1, 2, &options, "unix:/nonexistent/x", &alone));
    CHECK(alone == NULL);
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_group(secret, 0, &options, two));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create_group(secret, 2, &options, NULL));

    float vector[4] = {1, 2, 3, 4}, zeros[4] = {0};
    size_t rank = 9, ranks = 9, begin, end;
    bool poisoned = true;
    WORKS(ringseal_communicator_create(secret, 0, 1, &options, only_me, NULL, &alone));
    WORKS(ringseal_communicator_info(alone, &rank, &ranks, &poisoned));
    CHECK(rank == 0 && ranks == 1 && !poisoned);
    WORKS(ringseal_all_reduce(alone, vector, vector, 4, RINGSEAL_DTYPE_F32, RINGSEAL_OP_AVG));
    CHECK(vector[3] == 4);
    WORKS(ringseal_all_reduce(alone, NULL, NULL, 0, RINGSEAL_DTYPE_F32, RINGSEAL_OP_AVG));
    WORKS(ringseal_communicator_rekey(alone));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(NULL, vector, vector, 4, 0, 0));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, NULL, vector, 4, 0, 0));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, vector, NULL, 4, 0, 0));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, vector, vector, SIZE_MAX, 0, 0));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, vector, vector, SIZE_MAX / 4, 0, 0));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, vector, vector + 1, 3, 0, 0));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, vector, vector, 4, 10, 0));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, vector, vector, 4, 0, 5));
    FAILS(INVALID_ARGUMENT, ringseal_all_reduce(alone, vector, vector, 4, UINT32_MAX, UINT32_MAX));
    FAILS(INVALID_ARGUMENT, ringseal_broadcast(alone, vector, vector, 4, 0, 1));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_set_timeout(alone, 0));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_rekey(NULL));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_info(NULL, &rank, NULL, NULL));
    WORKS(ringseal_communicator_info(alone, NULL, NULL, &poisoned));
    CHECK(!poisoned);
    FAILS(INVALID_ARGUMENT, ringseal_chunk(10, 0, 0, &begin, &end));
    FAILS(INVALID_ARGUMENT, ringseal_chunk(10, 3, 3, &begin, &end));
    FAILS(INVALID_ARGUMENT, ringseal_chunk(10, 3, 0, NULL, &end));
    ringseal_communicator_destroy(alone);
    ringseal_communicator_destroy(NULL);

    ringseal_gpu_communicator *gpu = (ringseal_gpu_communicator *)1;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(NULL, 0, 1, 0, 1024, NULL, only_me, NULL, &gpu));
    CHECK(gpu == NULL);
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 1, 0, 1024, NULL, NULL, NULL, &gpu));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 1, 1, 0, 1024, NULL, only_me, NULL, &gpu));
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 1, 9999, 1024, NULL, only_me, NULL, &gpu));
    ringseal_options ahead = {.struct_bytes = sizeof ahead, .keystream_collectives = 2};
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 1, 9999, 1024, &ahead, only_me, NULL, &gpu));
    CHECK(strstr(ringseal_last_error(), "keystream_bytes"));
    ahead = (ringseal_options){.struct_bytes = sizeof ahead, .keystream_makers = 8};
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 1, 9999, 1024, &ahead, only_me, NULL, &gpu));
    ahead = (ringseal_options){.struct_bytes = sizeof ahead, .keystream_collectives = 2, .keystream_bytes = 1024};
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &ahead, only_me, NULL, &gpu));
    ahead.keystream_makers = (size_t)1 << 32;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &ahead, only_me, NULL, &gpu));
    /* A program from before these options doesn't have them, whatever lies behind its own. */
    ahead.struct_bytes = offsetof(ringseal_options, keystream_collectives);
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &ahead, only_me, NULL, &gpu));
    ahead.struct_bytes += sizeof(size_t);
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &ahead, only_me, NULL, &gpu));
    /* What carries records: refused, or looked for on a GPU that there must be first. */
    ringseal_options carried = {.struct_bytes = sizeof carried, .transport = RINGSEAL_TRANSPORT_NCCL};
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &carried, only_me, NULL, &gpu));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 0, 1, &carried, only_me, NULL, &alone));
    CHECK(strstr(ringseal_last_error(), "transport"));
    carried.node_ranks = 2;
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 4, 9999, 1024, &carried, only_me, NULL, &gpu));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 3, 9999, 1024, &carried, only_me, NULL, &gpu));
    CHECK(strstr(ringseal_last_error(), "node_ranks"));
    carried.keystream_collectives = carried.keystream_bytes = 16;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 4, 9999, 1024, &carried, only_me, NULL, &gpu));
    CHECK(strstr(ringseal_last_error(), "keystream"));
    carried = (ringseal_options){.struct_bytes = sizeof carried, .node_ranks = 2};
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 4, 9999, 1024, &carried, only_me, NULL, &gpu));
    carried = (ringseal_options){.struct_bytes = sizeof carried, .transport = 2};
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 4, 9999, 1024, &carried, only_me, NULL, &gpu));
    carried.struct_bytes = offsetof(ringseal_options, transport);
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 4, 9999, 1024, &carried, only_me, NULL, &gpu));
    ringseal_options few = {.struct_bytes = sizeof few, .sm_budget = 16};
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &few, only_me, NULL, &gpu));
    FAILS(INVALID_ARGUMENT, ringseal_communicator_create(secret, 0, 1, &few, only_me, NULL, &alone));
    CHECK(strstr(ringseal_last_error(), "sm_budget"));
    few.sm_budget = (size_t)1 << 32;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &few, only_me, NULL, &gpu));
    few.struct_bytes = offsetof(ringseal_options, sm_budget);
    FAILS(NO_DEVICE, ringseal_gpu_communicator_create(secret, 0, 2, 9999, 1024, &few, only_me, NULL, &gpu));
    size_t made = 0;
    uint32_t misses = 0;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_make_keystream(NULL, &made, 1, &made));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_wait_for_keystream(NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_keystream_misses(NULL, &misses));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_all_reduce(NULL, vector, vector, 4, 0, 0, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_reduce_scatter(NULL, vector, vector, 4, 0, 0, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_all_gather(NULL, vector, vector, 4, 0, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_broadcast(NULL, vector, vector, 4, 0, 0, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_outcome(NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_communicator_close(NULL));
    ringseal_gpu_communicator_destroy(NULL);

    /* The other rank never comes. */
    WORKS(ringseal_communicator_create_group(NULL, 2, &options, two));
    FAILS(DEADLINE, ringseal_all_reduce(two[0], vector, vector, 4, 0, 0));
    CHECK(memcmp(vector, zeros, sizeof vector) == 0);
    WORKS(ringseal_communicator_info(two[0], NULL, NULL, &poisoned));
    CHECK(poisoned);
    FAILS(POISONED, ringseal_all_reduce(two[0], vector, vector, 4, 0, 0));
    FAILS(HANDSHAKE, ringseal_communicator_rekey(two[0]));
    ringseal_communicator_destroy(two[0]);
    ringseal_communicator_destroy(two[1]);
}

enum { RANKS = 3, COUNT = 1000 };

static void *collectives(void *handle) {
    ringseal_communicator *communicator = handle;
    static __thread double input[COUNT], output[COUNT];
    size_t rank, begin, end;
    WORKS(ringseal_communicator_info(communicator, &rank, NULL, NULL));
    WORKS(ringseal_chunk(COUNT, RANKS, rank, &begin, &end));
    for (int i = 0; i < COUNT; i++) input[i] = (double)(rank * COUNT) + i;
    const uint32_t type = RINGSEAL_DTYPE_F64;

    WORKS(ringseal_all_reduce(communicator, input, output, COUNT, type, RINGSEAL_OP_SUM));
    for (int i = 0; i < COUNT; i++) CHECK(output[i] == 3.0 * COUNT + 3.0 * i && input[i] == (double)(rank * COUNT) + i);
    memset(output, 0, sizeof output);
    WORKS(ringseal_reduce_scatter(communicator, input, output, COUNT, type, RINGSEAL_OP_MIN));
    for (size_t i = begin; i < end; i++) CHECK(output[i - begin] == (double)i);
    CHECK(output[end - begin] == 0);
    /* In place: the chunk at its place in the vector. */
    WORKS(ringseal_reduce_scatter(communicator, input, input + begin, COUNT, type, RINGSEAL_OP_MIN));
    CHECK(input[begin] == (double)begin && input[end - 1] == (double)(end - 1));
    WORKS(ringseal_all_gather(communicator, input + begin, input, COUNT, type));
    for (int i = 0; i < COUNT; i++) CHECK(input[i] == i);
    memset(output, 0, sizeof output);
    WORKS(ringseal_all_gather(communicator, input + begin, output, COUNT, type));
    CHECK(memcmp(input, output, sizeof input) == 0);
    for (int i = 0; i < COUNT; i++) input[i] = (double)rank;
    WORKS(ringseal_broadcast(communicator, rank == 2 ? input : NULL, output, COUNT, type, 2));
    for (int i = 0; i < COUNT; i++) CHECK(output[i] == 2);
    WORKS(ringseal_broadcast(communicator, input, input, COUNT, type, 1));
    CHECK(input[0] == 1 && input[COUNT - 1] == 1);
    /* At a wrong place in the vector, on every rank. */
    FAILS(INVALID_ARGUMENT, ringseal_reduce_scatter(communicator, input, input + begin + 1, COUNT - 1, type, 0));
    return NULL;
}

static void group(void) {
    ringseal_communicator *handles[RANKS];
    pthread_t threads[RANKS];
    WORKS(ringseal_communicator_create_group(NULL, RANKS, NULL, handles));
    for (int rank = 0; rank < RANKS; rank++) CHECK(pthread_create(&threads[rank], NULL, collectives, handles[rank]) == 0);
    for (int rank = 0; rank < RANKS; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
    for (int rank = 0; rank < RANKS; rank++) ringseal_communicator_destroy(handles[rank]);
}

static void *wait_for_nobody(void *handle) {
    float vector = 1;
    ringseal_status status;
    do {
        status = ringseal_all_reduce(handle, &vector, &vector, 1, 0, 0);
    } while (status == RINGSEAL_STATUS_BUSY);
    return status == RINGSEAL_STATUS_DEADLINE ? handle : NULL;
}

/* While a thread is inside a collective, another one is told so. */
static void busy(void) {
    ringseal_options options = {.struct_bytes = sizeof options, .timeout_ms = 500};
    ringseal_communicator *two[2];
    pthread_t thread;
    void *outcome;
    ringseal_status status;
    WORKS(ringseal_communicator_create_group(NULL, 2, &options, two));
    CHECK(pthread_create(&thread, NULL, wait_for_nobody, two[0]) == 0);
    bool over = false;
    do {
        status = ringseal_communicator_info(two[0], NULL, NULL, &over);
    } while (status == RINGSEAL_STATUS_OK && !over);
    CHECK(status == RINGSEAL_STATUS_BUSY);
    CHECK(pthread_join(thread, &outcome) == 0 && outcome == two[0]);
    ringseal_communicator_destroy(two[0]);
    ringseal_communicator_destroy(two[1]);
}

static void keystream(void) {
    CHECK(ringseal_keystream_pays(32, 132) && ringseal_keystream_pays(33, 132));
    CHECK(!ringseal_keystream_pays(34, 132) && !ringseal_keystream_pays(0, 132));
}

/* What is refused before a GPU is looked for. */
static void gpu_aead(void) {
    const uint8_t zeros[32] = {0};
    uint32_t words[4] = {0};
    ringseal_gpu_aead *aead = (ringseal_gpu_aead *)1;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_aead_create(zeros, 16, 0, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_aead_create(NULL, 16, 0, &aead));
    CHECK(aead == NULL);
    FAILS(LENGTH, ringseal_gpu_aead_create(zeros, 20, 0, &aead));
    FAILS(NO_DEVICE, ringseal_gpu_aead_create(zeros, 16, 1000, &aead));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_seal(NULL, zeros, 12, NULL, 0, NULL, NULL, 0, words, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_open(NULL, zeros, 12, NULL, 0, NULL, NULL, 0, words, words, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_gmac(NULL, zeros, 12, NULL, 0, words, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_gmac_verify(NULL, zeros, 12, NULL, 0, words, words, NULL));
    ringseal_gpu_aead_destroy(NULL);
}

/* Likewise. */
static void gpu_copy(void) {
    const uint8_t secret[RINGSEAL_SECRET_BYTES] = {0};
    uint8_t text[16] = {0};
    bool poisoned = true;
    ringseal_gpu_copy *copy = (ringseal_gpu_copy *)1;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_create(secret, 0, NULL, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_create(NULL, 0, NULL, &copy));
    CHECK(copy == NULL);
    ringseal_copy_options options = {.struct_bytes = sizeof options - 8};
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_create(secret, 0, &options, &copy));
    options = (ringseal_copy_options){.struct_bytes = sizeof options, .protection = RINGSEAL_PROTECTION_NONE};
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_create(secret, 0, &options, &copy));
    options.protection = 3;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_create(secret, 0, &options, &copy));
    options = (ringseal_copy_options){.struct_bytes = sizeof options, .record_bytes = 1000};
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_create(secret, 0, &options, &copy));
    options.record_bytes = ((size_t)1 << 30) + 16;
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_create(secret, 0, &options, &copy));
    options = (ringseal_copy_options){.struct_bytes = sizeof options, .slots = 2, .threads = 1, .key_bytes = 1 << 20};
    FAILS(NO_DEVICE, ringseal_gpu_copy_create(secret, 1000, &options, &copy));
    FAILS(NO_DEVICE, ringseal_gpu_copy_create(secret, 1000, NULL, &copy));
    CHECK(copy == NULL);
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_to_device(NULL, text, text, 16, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_to_host(NULL, text, text, 16, NULL));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_rekey(NULL, secret));
    FAILS(INVALID_ARGUMENT, ringseal_gpu_copy_poisoned(NULL, &poisoned));
    ringseal_gpu_copy_destroy(NULL);
}

int main(void) {
    CHECK(ringseal_abi_version() == RINGSEAL_ABI_VERSION);
    CHECK(strchr(ringseal_version(), '.'));
    CHECK(strcmp(ringseal_status_name(RINGSEAL_STATUS_INTERNAL), "internal") == 0);
    CHECK(strcmp(ringseal_status_name(-1), "unknown") == 0 && strcmp(ringseal_status_name(17), "unknown") == 0);
    aead();
    gpu_aead();
    keystream();
    gpu_copy();
    creation();
    group();
    busy();
    printf("%d checks\n", checks);
    return 0;
}
