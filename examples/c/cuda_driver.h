/*
 * What the examples need of the CUDA driver API, loaded at run time so that they compile everywhere; with the CUDA runtime, the
 * memory would come from cudaMalloc() and the stream from cudaStreamCreate().
 */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address; /* CUdeviceptr */

static int (*cuInit)(unsigned);
static int (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuCtxSetCurrent)(void *);
static int (*cuStreamCreate)(void **, unsigned);
static int (*cuStreamSynchronize)(void *);
static int (*cuMemAlloc)(address *, size_t);
static int (*cuMemsetD8Async)(address, unsigned char, size_t, void *);
static int (*cuMemcpyHtoD)(address, const void *, size_t);
static int (*cuMemcpyDtoH)(void *, address, size_t);

static void load_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    const struct { void *place; const char *name; } functions[] = {
        {&cuInit, "cuInit"},
        {&cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"},
        {&cuCtxSetCurrent, "cuCtxSetCurrent"},
        {&cuStreamCreate, "cuStreamCreate"},
        {&cuStreamSynchronize, "cuStreamSynchronize"},
        {&cuMemAlloc, "cuMemAlloc_v2"},
        {&cuMemsetD8Async, "cuMemsetD8Async"},
        {&cuMemcpyHtoD, "cuMemcpyHtoD_v2"},
        {&cuMemcpyDtoH, "cuMemcpyDtoH_v2"},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = driver ? dlsym(driver, functions[i].name) : NULL;
        if (!function) {
            fprintf(stderr, "no %s in libcuda.so.1\n", functions[i].name);
            exit(1);
        }
        memcpy(functions[i].place, &function, sizeof function);
    }
}

#define EXPECT(condition)                                                                                    \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, ringseal_last_error()); \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
