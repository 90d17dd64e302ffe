/*
 * Seals and opens a message in GPU memory, on a stream, and shows what a wrong tag leaves there. Without a GPU it says so
 * and ends well.
 *
 *     cargo build --release -p ringseal-capi
 *     cc -Iinclude examples/c/gpu_seal.c -o gpu_seal -Ltarget/release -lringseal_c -ldl
 *     LD_LIBRARY_PATH=target/release ./gpu_seal
 */
#include "ringseal.h"

#include "cuda_driver.h"

/* Test case 16 of McGrew and Viega, "The Galois/Counter Mode of Operation (GCM)": AES-256, additional data. */
static const uint8_t KEY[32] = {0xfe, 0xff, 0xe9, 0x92, 0x86, 0x65, 0x73, 0x1c, 0x6d, 0x6a, 0x8f, 0x94, 0x67, 0x30, 0x83, 0x08,
                                0xfe, 0xff, 0xe9, 0x92, 0x86, 0x65, 0x73, 0x1c, 0x6d, 0x6a, 0x8f, 0x94, 0x67, 0x30, 0x83, 0x08};
static const uint8_t IV[12] = {0xca, 0xfe, 0xba, 0xbe, 0xfa, 0xce, 0xdb, 0xad, 0xde, 0xca, 0xf8, 0x88};
static const uint8_t AAD[20] = {0xfe, 0xed, 0xfa, 0xce, 0xde, 0xad, 0xbe, 0xef, 0xfe, 0xed,
                                0xfa, 0xce, 0xde, 0xad, 0xbe, 0xef, 0xab, 0xad, 0xda, 0xd2};
static const uint8_t TEXT[60] = {0xd9, 0x31, 0x32, 0x25, 0xf8, 0x84, 0x06, 0xe5, 0xa5, 0x59, 0x09, 0xc5, 0xaf, 0xf5, 0x26,
                                 0x9a, 0x86, 0xa7, 0xa9, 0x53, 0x15, 0x34, 0xf7, 0xda, 0x2e, 0x4c, 0x30, 0x3d, 0x8a, 0x31,
                                 0x8a, 0x72, 0x1c, 0x3c, 0x0c, 0x95, 0x95, 0x68, 0x09, 0x53, 0x2f, 0xcf, 0x0e, 0x24, 0x49,
                                 0xa6, 0xb5, 0x25, 0xb1, 0x6a, 0xed, 0xf5, 0xaa, 0x0d, 0xe6, 0x57, 0xba, 0x63, 0x7b, 0x39};
static const uint8_t TAG[16] = {0x76, 0xfc, 0x6e, 0xce, 0x0f, 0x4e, 0x17, 0x68,
                                0xcd, 0xdf, 0x88, 0x53, 0xbb, 0x2d, 0x55, 0x1b};

/* Where things lie in one piece of device memory. */
enum { PLAIN = 0, SEALED = 64, OPENED = 128, EXTRA = 192, MAC = 224, VERDICT = 240, ALL = 256 };

static void *at(address memory, size_t offset) { return (void *)(uintptr_t)(memory + offset); }

/* The verdict, once the stream has passed the work. */
static uint32_t verdict(address memory, void *stream) {
    uint32_t word;
    EXPECT(cuStreamSynchronize(stream) == 0);
    EXPECT(cuMemcpyDtoH(&word, memory + VERDICT, sizeof word) == 0);
    return word;
}

int main(void) {
    ringseal_gpu_aead *aead;
    ringseal_status status = ringseal_gpu_aead_create(KEY, sizeof KEY, 0, &aead);
    if (status == RINGSEAL_STATUS_NO_DEVICE || status == RINGSEAL_STATUS_UNSUPPORTED) {
        printf("SKIPPED: %s\n", ringseal_last_error());
        return 0;
    }
    EXPECT(status == RINGSEAL_STATUS_OK);
    load_driver();
    void *context, *stream;
    address memory;
    EXPECT(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    EXPECT(cuStreamCreate(&stream, 1 /* CU_STREAM_NON_BLOCKING */) == 0 && cuMemAlloc(&memory, ALL) == 0);
    EXPECT(cuMemcpyHtoD(memory + PLAIN, TEXT, sizeof TEXT) == 0 && cuMemcpyHtoD(memory + EXTRA, AAD, sizeof AAD) == 0);

    EXPECT(ringseal_gpu_seal(aead, IV, sizeof IV, at(memory, EXTRA), sizeof AAD, at(memory, PLAIN), at(memory, SEALED),
                             sizeof TEXT, at(memory, MAC), stream) == RINGSEAL_STATUS_OK);
    uint8_t sealed[sizeof TEXT], expected[sizeof TEXT], tag[16], opened[sizeof TEXT], zeros[sizeof TEXT] = {0};
    EXPECT(cuStreamSynchronize(stream) == 0);
    EXPECT(cuMemcpyDtoH(sealed, memory + SEALED, sizeof sealed) == 0 && cuMemcpyDtoH(tag, memory + MAC, sizeof tag) == 0);
    EXPECT(memcmp(tag, TAG, sizeof tag) == 0);
    /* The CPU says the same. */
    ringseal_aead *cpu;
    EXPECT(ringseal_aead_create(KEY, sizeof KEY, NULL, &cpu) == RINGSEAL_STATUS_OK);
    EXPECT(ringseal_seal(cpu, IV, sizeof IV, AAD, sizeof AAD, TEXT, expected, sizeof TEXT, tag) == RINGSEAL_STATUS_OK);
    EXPECT(memcmp(sealed, expected, sizeof sealed) == 0);

    /* Opened, it is the text. */
    EXPECT(ringseal_gpu_open(aead, IV, sizeof IV, at(memory, EXTRA), sizeof AAD, at(memory, SEALED), at(memory, OPENED),
                             sizeof TEXT, at(memory, MAC), at(memory, VERDICT), stream) == RINGSEAL_STATUS_OK);
    EXPECT(verdict(memory, stream) == RINGSEAL_VERDICT_VERIFIED);
    EXPECT(cuMemcpyDtoH(opened, memory + OPENED, sizeof opened) == 0 && memcmp(opened, TEXT, sizeof TEXT) == 0);

    /* With a changed tag it is zeros, and the ciphertext, which lies apart, is as it was. */
    tag[15] ^= 1;
    EXPECT(cuMemcpyHtoD(memory + MAC, tag, sizeof tag) == 0);
    EXPECT(ringseal_gpu_open(aead, IV, sizeof IV, at(memory, EXTRA), sizeof AAD, at(memory, SEALED), at(memory, OPENED),
                             sizeof TEXT, at(memory, MAC), at(memory, VERDICT), stream) == RINGSEAL_STATUS_OK);
    EXPECT(verdict(memory, stream) == RINGSEAL_VERDICT_FORGED);
    EXPECT(cuMemcpyDtoH(opened, memory + OPENED, sizeof opened) == 0 && memcmp(opened, zeros, sizeof zeros) == 0);
    EXPECT(cuMemcpyDtoH(opened, memory + SEALED, sizeof opened) == 0 && memcmp(opened, expected, sizeof expected) == 0);

    /* GMAC: of data that only the tag protects. Another IV, as it must be. */
    const uint8_t other[12] = {1};
    EXPECT(ringseal_gpu_gmac(aead, other, sizeof other, at(memory, PLAIN), sizeof TEXT, at(memory, MAC), stream) ==
           RINGSEAL_STATUS_OK);
    EXPECT(cuStreamSynchronize(stream) == 0 && cuMemcpyDtoH(tag, memory + MAC, sizeof tag) == 0);
    EXPECT(ringseal_gmac_verify(cpu, other, sizeof other, TEXT, sizeof TEXT, tag, sizeof tag) == RINGSEAL_STATUS_OK);
    EXPECT(ringseal_gpu_gmac_verify(aead, other, sizeof other, at(memory, PLAIN), sizeof TEXT, at(memory, MAC),
                                    at(memory, VERDICT), stream) == RINGSEAL_STATUS_OK);
    EXPECT(verdict(memory, stream) == RINGSEAL_VERDICT_VERIFIED);
    EXPECT(ringseal_gpu_gmac_verify(aead, other, sizeof other, at(memory, PLAIN), sizeof TEXT - 1, at(memory, MAC),
                                    at(memory, VERDICT), stream) == RINGSEAL_STATUS_OK);
    EXPECT(verdict(memory, stream) == RINGSEAL_VERDICT_FORGED);

    /* Addresses that can't be right are refused before anything is queued. */
    EXPECT(ringseal_gpu_seal(aead, IV, sizeof IV, NULL, 0, at(memory, PLAIN), at(memory, PLAIN + 16), 60, at(memory, MAC),
                             stream) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    EXPECT(ringseal_gpu_seal(aead, IV, sizeof IV, NULL, 0, at(memory, PLAIN), at(memory, SEALED), 60, at(memory, MAC + 1),
                             stream) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    EXPECT(ringseal_gpu_open(aead, IV, sizeof IV, NULL, 0, at(memory, SEALED), at(memory, OPENED), 60, at(memory, MAC), NULL,
                             stream) == RINGSEAL_STATUS_INVALID_ARGUMENT);
    ringseal_aead_destroy(cpu);
    ringseal_gpu_aead_destroy(aead);
    printf("the GPU seals as the CPU, opens what is right, and leaves zeros of what is not\n");
    return 0;
}
