// ringseal's PTX pack in a C++ program, by the CUDA driver API: AES-CTR and AES-GCM against NIST vectors.
//
//   ringseal ptx --out pack
//   g++ -std=c++17 -I pack -I "$CUDA_HOME/include" main.cpp -o ptx-cuda-cpp -lcuda     (or nvcc with the same arguments)
//   ./ptx-cuda-cpp pack
//
// docs/ptx.md explains what is done here.

#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "ringseal_ptx.h"

using Bytes = std::vector<uint8_t>;

static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return;
    const char *text = nullptr;
    cuGetErrorString(result, &text);
    std::fprintf(stderr, "%s: %s\n", what, text ? text : "unknown error");
    std::exit(2);
}
#define CHECK(call) check(call, #call)

static Bytes hex(const char *text) {
    Bytes bytes;
    for (; *text; text += 2) bytes.push_back((uint8_t)std::stoi(std::string(text, 2), nullptr, 16));
    return bytes;
}

// The key schedule of FIPS 197, 5.2, as little-endian words. The S-box is computed by search: this runs once a key.
static uint8_t substitute(uint8_t x) {
    auto multiply = [](uint8_t a, uint8_t b) {
        uint8_t product = 0;
        for (; b; b >>= 1, a = (uint8_t)(a << 1 ^ (a >> 7) * 0x1b)) product ^= (b & 1) ? a : 0;
        return product;
    };
    uint8_t inverse = 0;
    for (int y = 1; y < 256 && x; y++) {
        if (multiply(x, (uint8_t)y) == 1) inverse = (uint8_t)y;
    }
    uint8_t s = 0x63;
    for (int turn = 0; turn < 5; turn++) s ^= (uint8_t)(inverse << turn | inverse >> (8 - turn));
    return s;
}

static void expand_key(const Bytes &key, uint32_t (&words)[60]) {
    auto substitute_word = [](uint32_t w) {
        return (uint32_t)substitute((uint8_t)w) | (uint32_t)substitute((uint8_t)(w >> 8)) << 8 |
               (uint32_t)substitute((uint8_t)(w >> 16)) << 16 | (uint32_t)substitute((uint8_t)(w >> 24)) << 24;
    };
    const size_t length = key.size() / 4, total = 4 * (length + 7);
    std::memset(words, 0, sizeof words);
    std::memcpy(words, key.data(), key.size());
    uint8_t constant = 1;
    for (size_t i = length; i < total; i++) {
        uint32_t word = words[i - 1];
        if (i % length == 0) {
            word = substitute_word(word >> 8 | word << 24) ^ constant;
            constant = (uint8_t)(constant << 1 ^ (constant >> 7) * 0x1b);
        } else if (length == 8 && i % length == 4) {
            word = substitute_word(word);
        }
        words[i] = words[i - length] ^ word;
    }
}

// Device memory, filled from bytes.
struct Device {
    CUdeviceptr pointer = 0;
    size_t bytes;
    explicit Device(size_t size) : bytes(size) { CHECK(cuMemAlloc(&pointer, size ? size : 1)); }
    explicit Device(const Bytes &from) : Device((from.size() + 15) / 16 * 16) {
        CHECK(cuMemsetD8(pointer, 0, bytes ? bytes : 1));
        CHECK(cuMemcpyHtoD(pointer, from.data(), from.size()));
    }
    Device(const Device &) = delete;
    ~Device() { cuMemFree(pointer); }
    Bytes read(size_t size) const {
        Bytes to(size);
        CHECK(cuMemcpyDtoH(to.data(), pointer, size));
        return to;
    }
};

struct Pack {
    CUmodule module;
    const ringseal_kernel *table;

    Pack(const std::string &folder, const char *target, const ringseal_kernel *kernels) : table(kernels) {
        // The cubin needs no compilation; the driver compiles the PTX, once, and keeps the result.
        for (const char *ending : {".cubin", ".ptx"}) {
            const std::string path = folder + "/ringseal_" + target + ending;
            if (std::ifstream(path).good()) {
                CHECK(cuModuleLoad(&module, path.c_str()));
                std::printf("loaded %s\n", path.c_str());
                return;
            }
        }
        std::fprintf(stderr, "no ringseal_%s.ptx in %s\n", target, folder.c_str());
        std::exit(2);
    }

    template <class Parameters>
    void launch(const std::string &name, unsigned blocks, Parameters parameters) const {
        const ringseal_kernel *kernel = ringseal_find_kernel(table, name.c_str());
        if (!kernel || kernel->parameter_bytes != sizeof parameters) {
            std::fprintf(stderr, "%s is not in this module, or takes another structure\n", name.c_str());
            std::exit(2);
        }
        CUfunction function;
        CHECK(cuModuleGetFunction(&function, module, kernel->name));
        CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)kernel->shared_bytes));
        void *arguments[] = {&parameters};
        CHECK(cuLaunchKernel(function, blocks, 1, 1, kernel->threads, 1, 1, kernel->shared_bytes, nullptr, arguments,
                             nullptr));
        CHECK(cuCtxSynchronize());
    }
};

static int failures = 0;

static void expect(const char *what, const Bytes &got, const Bytes &wanted) {
    const bool same = got == wanted;
    std::printf("%-60s %s\n", what, same ? "ok" : "WRONG");
    failures += !same;
}

static Bytes ctr(const Pack &pack, const Bytes &key, const Bytes &counter, const Bytes &data) {
    Device input(data), output(data.size());
    ringseal_ctr_params parameters = {};
    expand_key(key, parameters.keys);
    std::memcpy(parameters.counter, counter.data(), 16);
    parameters.input = input.pointer;
    parameters.output = output.pointer;
    parameters.bytes = data.size();
    parameters.carry = 1; // SP 800-38A counts in all 128 bits
    pack.launch("aes" + std::to_string(8 * key.size()) + "_ctr_xor", 1, parameters);
    return output.read(data.size());
}

// H = E(K, 0): the first 16 bytes of keystream from counter 0. Then the matrices made from it.
static void ghash_key(const Pack &pack, const Bytes &key, const Device &matrices) {
    Device h(16);
    ringseal_ctr_params stream = {};
    expand_key(key, stream.keys);
    stream.output = h.pointer;
    stream.bytes = 16;
    pack.launch("aes" + std::to_string(8 * key.size()) + "_ctr_keystream", 1, stream);
    ringseal_ghash_key_params parameters = {};
    std::memcpy(parameters.h, h.read(16).data(), 16);
    parameters.key = matrices.pointer;
    pack.launch("ghash_key", RINGSEAL_GHASH_KEY_GRID, parameters);
}

static void gcm(const Pack &pack, const char *what, const Bytes &key, const Bytes &nonce, const Bytes &plaintext,
                const Bytes &aad, const Bytes &ciphertext, const Bytes &tag) {
    const std::string bits = std::to_string(8 * key.size());
    Device matrices(sizeof(ringseal_ghash_key));
    ghash_key(pack, key, matrices);

    Device input(plaintext), output(input.bytes), data(aad), tags(16), verdict(Bytes{0, 0, 0, 0});
    ringseal_record record = {};
    record.input = input.pointer;
    record.output = output.pointer;
    record.aad = data.pointer;
    record.tag = tags.pointer;
    record.verdict = verdict.pointer;
    record.length = (uint32_t)plaintext.size();
    record.aad_length = (uint32_t)aad.size();
    std::memcpy(record.j0, nonce.data(), 12); // J0 of a 96-bit nonce: the nonce, then 1 big-endian
    reinterpret_cast<uint8_t *>(record.j0)[15] = 1;
    Device records(sizeof record);
    const auto run = [&](const char *kernel, CUdeviceptr from, CUdeviceptr to) {
        record.input = from;
        record.output = to;
        CHECK(cuMemcpyHtoD(records.pointer, &record, sizeof record));
        CHECK(cuMemsetD32(verdict.pointer, 0, 1));
        ringseal_records_params parameters = {};
        expand_key(key, parameters.keys);
        parameters.ghash_key = matrices.pointer;
        parameters.records = records.pointer;
        parameters.count = 1;
        pack.launch(kernel + bits, 1, parameters);
    };
    const auto verdict_is = [&](uint32_t wanted) {
        Bytes bytes(4);
        std::memcpy(bytes.data(), &wanted, 4);
        expect("  verdict", verdict.read(4), bytes);
    };

    run("gcm_seal_records_", input.pointer, output.pointer);
    expect(what, output.read(plaintext.size()), ciphertext);
    expect("  tag", tags.read(16), tag);

    Device opened(input.bytes);
    run("gcm_open_records_", output.pointer, opened.pointer);
    verdict_is(RINGSEAL_VERIFIED);
    expect("  opened", opened.read(plaintext.size()), plaintext);

    CHECK(cuMemsetD8(output.pointer + 7, (unsigned char)(ciphertext[7] ^ 1), 1));
    run("gcm_open_records_", output.pointer, opened.pointer);
    verdict_is(RINGSEAL_FORGED);
    expect("  forged: zeros", opened.read(plaintext.size()), Bytes(plaintext.size(), 0));
}

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER   (what `ringseal ptx --out FOLDER` wrote)\n", argv[0]);
        return 2;
    }
    CUdevice device;
    CUcontext context;
    int major, minor;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    CHECK(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    const bool hopper = major == 9 && minor == 0;
    const Pack pack(argv[1], hopper ? "sm_90a" : "sm_80", hopper ? ringseal_kernels_sm_90a : ringseal_kernels_sm_80);

    // NIST SP 800-38A, F.5.1 and F.5.5.
    const Bytes counter = hex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff");
    const Bytes text = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
                           "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710");
    expect("SP 800-38A F.5.1, AES-128-CTR", ctr(pack, hex("2b7e151628aed2a6abf7158809cf4f3c"), counter, text),
           hex("874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
               "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"));
    expect("SP 800-38A F.5.5, AES-256-CTR",
           ctr(pack, hex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"), counter, text),
           hex("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
               "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"));

    if (ringseal_find_kernel(pack.table, "gcm_seal_records_128")) {
        // CAVP gcmEncryptExtIV128.rsp and 256: IVlen 96, PTlen 408, AADlen 160, Taglen 128, Count 0.
        gcm(pack, "CAVP, AES-128-GCM, 51 bytes", hex("fe47fcce5fc32665d2ae399e4eec72ba"),
            hex("5adb9609dbaeb58cbd6e7275"),
            hex("7c0e88c88899a779228465074797cd4c2e1498d259b54390b85e3eef1c02df60e743f1b840382c4bccaf3bafb4ca8429bea063"),
            hex("88319d6e1d3ffa5f987199166c8a9b56c2aeba5a"),
            hex("98f4826f05a265e6dd2be82db241c0fbbbf9ffb1c173aa83964b7cf5393043736365253ddbc5db8778371495da76d269e5db3e"),
            hex("291ef1982e4defedaa2249f898556b47"));
        gcm(pack, "CAVP, AES-256-GCM, 51 bytes",
            hex("24501ad384e473963d476edcfe08205237acfd49b5b8f33857f8114e863fec7f"), hex("9ff18563b978ec281b3f2794"),
            hex("27f348f9cdc0c5bd5e66b1ccb63ad920ff2219d14e8d631b3872265cf117ee86757accb158bd9abb3868fdc0d0b074b5f01b2c"),
            hex("adb5ec720ccf9898500028bf34afccbcaca126ef"),
            hex("eb7cb754c824e8d96f7c6d9b76c7d26fb874ffbf1d65c6f64a698d839b0b06145dae82057ad55994cf59ad7f67c0fa5e85fab8"),
            hex("bc95c532fecc594c36d1550286a7a3f0"));
    } else {
        std::printf("no GCM kernels for this GPU: skipped\n");
    }
    std::printf(failures ? "%d WRONG\n" : "all right\n", failures);
    return failures ? 1 : 0;
}
