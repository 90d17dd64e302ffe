/*
 * Copies an array to GPU memory and back so that only ciphertext and tags lie in the memory that the bus reads and writes,
 * and shows which calls are refused before a GPU is looked for. Without a GPU it does that much, says that it skips the
 * copies, and ends well.
 *
 *     cargo build --release -p ringseal-capi
 *     cc -Iinclude examples/c/gpu_copy.c -o gpu_copy -Ltarget/release -lringseal_c -ldl
 *     LD_LIBRARY_PATH=target/release ./gpu_copy
 */
#include "ringseal.h"

#include "cuda_driver.h"

/* A real one comes from the system's random numbers, or from what the two sides attested to each other. */
static const uint8_t SECRET[RINGSEAL_SECRET_BYTES] = {1, 2, 3};

static void refused_without_a_gpu(void) {
    ringseal_gpu_copy *copy = (ringseal_gpu_copy *)1;
    EXPECT(ringseal_gpu_copy_create(NULL, 0, NULL, &copy) == RINGSEAL_STATUS_INVALID_ARGUMENT && copy == NULL);
    ringseal_copy_options options = {.struct_bytes = sizeof options, .protection = RINGSEAL_PROTECTION_NONE};
    EXPECT(ringseal_gpu_copy_create(SECRET, 0, &options, &copy) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    options = (ringseal_copy_options){.struct_bytes = sizeof options, .record_bytes = 100};
    EXPECT(ringseal_gpu_copy_create(SECRET, 0, &options, &copy) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    EXPECT(strstr(ringseal_last_error(), "multiple of 16"));
    EXPECT(ringseal_gpu_copy_to_device(NULL, NULL, SECRET, 1, NULL) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    printf("what can't be is refused\n");
}

/* A vector that is no multiple of a record, and its trip through the GPU. */
enum { COUNT = 1234567 };

int main(void) {
    refused_without_a_gpu();
    ringseal_copy_options options = {.struct_bytes = sizeof options, .protection = RINGSEAL_PROTECTION_AES128_GCM};
    ringseal_gpu_copy *copy;
    ringseal_status status = ringseal_gpu_copy_create(SECRET, 0, &options, &copy);
    if (status == RINGSEAL_STATUS_NO_DEVICE || status == RINGSEAL_STATUS_UNSUPPORTED) {
        printf("SKIPPED: the copies themselves: %s\n", ringseal_last_error());
        return 0;
    }
    EXPECT(status == RINGSEAL_STATUS_OK);
    load_driver();
    void *context, *stream;
    address memory;
    size_t bytes = COUNT * sizeof(uint32_t);
    EXPECT(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    EXPECT(cuStreamCreate(&stream, 1 /* CU_STREAM_NON_BLOCKING */) == 0 && cuMemAlloc(&memory, bytes) == 0);
    uint32_t *sent = malloc(bytes), *seen = malloc(bytes);
    EXPECT(sent && seen);
    for (uint32_t i = 0; i < COUNT; i++) sent[i] = i * 2654435761u;

    /* The copy comes after what is on the stream, and is done when the call returns. */
    void *at = (void *)(uintptr_t)memory;
    EXPECT(cuMemsetD8Async(memory, 0xee, bytes, stream) == 0);
    EXPECT(ringseal_gpu_copy_to_device(copy, at, sent, bytes, stream) == RINGSEAL_STATUS_OK);
    EXPECT(cuMemcpyDtoH(seen, memory, bytes) == 0 && memcmp(seen, sent, bytes) == 0);

    EXPECT(cuMemsetD8Async(memory, 0x11, bytes / 2, stream) == 0);
    EXPECT(ringseal_gpu_copy_to_host(copy, seen, at, bytes, stream) == RINGSEAL_STATUS_OK);
    memset(sent, 0x11, bytes / 2);
    EXPECT(memcmp(seen, sent, bytes) == 0);

    /* Refused before anything is copied, so that the handle is as good as before. */
    bool poisoned = true;
    EXPECT(ringseal_gpu_copy_to_device(copy, (char *)at + 4, sent, 16, stream) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    EXPECT(ringseal_gpu_copy_to_host(copy, NULL, at, 16, stream) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    EXPECT(ringseal_gpu_copy_poisoned(copy, &poisoned) == RINGSEAL_STATUS_OK && !poisoned);

    /* Other keys from here on. */
    EXPECT(ringseal_gpu_copy_rekey(copy, SECRET) == RINGSEAL_STATUS_OK);
    EXPECT(ringseal_gpu_copy_to_host(copy, seen, at, bytes, NULL) == RINGSEAL_STATUS_OK);
    EXPECT(memcmp(seen, sent, bytes) == 0);
    ringseal_gpu_copy_destroy(copy);
    free(sent);
    free(seen);
    printf("what was copied there and back is as it was\n");
    return 0;
}
