// Free of races by the PTX ISA: every store to shared memory is before a barrier of the whole block that the loads of other
// threads come after, and each place is stored to by one thread between two such barriers. With NAMED, the warpgroups in turn
// also meet at a barrier of their own (numbers 1 to 4, 128 threads), as the exchange's kernels do.
#include <cstdio>
template <bool NAMED> __global__ void kernel(int *out, int records) {
    __shared__ int verdict, last[512];
    int i = threadIdx.x;
    for (int local = 0; local < records; local++) {
        last[i] = i + local;
        __syncthreads();
        out[i] = last[i ^ 256];
        if (NAMED && __shfl_sync(~0u, i / 128, 0) == local % 4) asm volatile("barrier.sync %0, 128;" :: "r"(1 + i / 128) : "memory");
        __syncthreads();
    }
    if (i == 0) verdict = 7;
    __syncthreads();
    out[i] += verdict;
}
int main(int argc, char **) {
    int *out; cudaMalloc(&out, 4096);
    for (int records = 0; records < 6; records++) {
        kernel<false><<<2, 512>>>(out, records);
        printf("block barriers only, %d records: %d\n", records, (int)cudaDeviceSynchronize()); fflush(stdout);
    }
    for (int records = 0; records < 6; records++) {
        kernel<true><<<2, 512>>>(out, records);
        printf("warpgroup barriers too, %d records: %d\n", records, (int)cudaDeviceSynchronize()); fflush(stdout);
    }
}
