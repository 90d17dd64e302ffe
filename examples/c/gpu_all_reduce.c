/*
 * Processes with a GPU, or a share of one, add up vectors in device memory by sealed all-reduces: once with AES on the way, then
 * with keystream that the GPU made ahead of time. Without a GPU it says that it skips them, and ends well.
 *
 *     cargo build --release -p ringseal-capi
 *     cc -Iinclude examples/c/gpu_all_reduce.c -o gpu_all_reduce -Ltarget/release -lringseal_c -ldl
 *     LD_LIBRARY_PATH=target/release ./gpu_all_reduce [RANKS [GPUS [nccl]]]
 *
 * Rank r is on GPU r modulo GPUS (default: 2 ranks on 1 GPU). With `nccl` records go by NCCL, which wants a GPU for each rank,
 * and finds no keystream.
 */
#define _DEFAULT_SOURCE
#include "ringseal.h"

#include "board.h"
#include "cuda_driver.h"

enum { COUNT = 1234567, ITERATIONS = 4, AHEAD = 2 };

static int ranks = 2, gpus = 1, over_nccl;

static int run(struct seat *seat, const uint8_t *secret) {
    size_t bytes = COUNT * sizeof(float);
    int device = seat->rank % gpus;
    ringseal_options options = {
        .struct_bytes = sizeof options,
        .protection = RINGSEAL_PROTECTION_AES128_GCM,
        .transport = over_nccl ? RINGSEAL_TRANSPORT_NCCL : RINGSEAL_TRANSPORT_PEER,
        .keystream_collectives = over_nccl ? 0 : AHEAD,
        .keystream_bytes = over_nccl ? 0 : bytes,
    };
    ringseal_gpu_communicator *communicator;
    ringseal_status status = ringseal_gpu_communicator_create(
        secret, seat->rank, ranks, device, bytes, &options, gather, seat, &communicator
    );
    if (status == RINGSEAL_STATUS_NO_DEVICE || status == RINGSEAL_STATUS_UNSUPPORTED) {
        printf("SKIPPED: rank %d: %s\n", seat->rank, ringseal_last_error());
        return 0;
    }
    EXPECT(status == RINGSEAL_STATUS_OK);
    load_driver();
    void *context, *stream;
    address input, output;
    EXPECT(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, device) == 0 && cuCtxSetCurrent(context) == 0);
    EXPECT(cuStreamCreate(&stream, 1 /* CU_STREAM_NON_BLOCKING */) == 0);
    EXPECT(cuMemAlloc(&input, bytes) == 0 && cuMemAlloc(&output, bytes) == 0);
    float *vector = malloc(bytes);
    EXPECT(vector);
    for (int i = 0; i < COUNT; i++) vector[i] = (float)(seat->rank + 1) * (float)(i % 100);
    EXPECT(cuMemcpyHtoD(input, vector, bytes) == 0);

    for (int iteration = 0; iteration < ITERATIONS; iteration++) {
        /* All ranks make as much, at the same place among their collectives. */
        int ahead = iteration > 0 && !over_nccl;
        if (ahead) {
            size_t lengths[AHEAD] = {bytes, bytes}, made = 0;
            EXPECT(ringseal_gpu_make_keystream(communicator, lengths, AHEAD, &made) == RINGSEAL_STATUS_OK && made == AHEAD);
            EXPECT(ringseal_gpu_wait_for_keystream(communicator) == RINGSEAL_STATUS_OK);
        }
        for (int turn = 0; turn < AHEAD; turn++) {
            EXPECT(cuMemsetD8Async(output, 0xee, bytes, stream) == 0);
            EXPECT(ringseal_gpu_all_reduce(
                       communicator, (void *)(uintptr_t)input, (void *)(uintptr_t)output, COUNT, RINGSEAL_DTYPE_F32,
                       RINGSEAL_OP_SUM, stream
                   ) == RINGSEAL_STATUS_OK);
            /* Until the outcome says that all records have verified, nobody may use the output. */
            EXPECT(cuStreamSynchronize(stream) == 0);
            EXPECT(ringseal_gpu_outcome(communicator) == RINGSEAL_STATUS_OK);
            EXPECT(cuMemcpyDtoH(vector, output, bytes) == 0);
            float sum = (float)(ranks * (ranks + 1) / 2);
            for (int i = 0; i < COUNT; i++) EXPECT(vector[i] == sum * (float)(i % 100));
        }
    }
    uint32_t misses = 0;
    if (!over_nccl) EXPECT(ringseal_gpu_keystream_misses(communicator, &misses) == RINGSEAL_STATUS_OK);
    printf("rank %d on GPU %d: sums are right, %u records found no keystream\n", seat->rank, device, misses);
    free(vector);
    EXPECT(ringseal_gpu_communicator_close(communicator) == RINGSEAL_STATUS_OK);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) ranks = atoi(argv[1]);
    if (argc > 2) gpus = atoi(argv[2]);
    over_nccl = argc > 3 && strcmp(argv[3], "nccl") == 0;
    if (ranks < 1 || ranks > MOST_RANKS || gpus < 1) {
        fprintf(stderr, "usage: %s [RANKS [GPUS [nccl]]]: 1 to %d ranks\n", argv[0], MOST_RANKS);
        return 2;
    }
    return fork_ranks(ranks, run);
}
