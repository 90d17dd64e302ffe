"""ringseal's PTX pack from CuPy: AES-CTR and AES-GCM against NIST vectors.

    ringseal ptx --out pack
    python3 main.py pack

The structures' fields, sizes and constants come from pack/manifest.json; docs/ptx.md explains what is done here.
"""

import json
import pathlib
import struct
import sys

import cupy
import numpy

SCALARS = {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "usize": "<u8", "i32": "<i4", "f32": "<f4"}


def field_type(ty, structures):
    """The numpy type of a Rust type in the manifest, and its shape."""
    if ty.startswith("["):
        element, length = ty[1:-1].rsplit("; ", 1)
        inner, shape = field_type(element, structures)
        return inner, (int(length), *shape)
    return SCALARS.get(ty) or structure_type(structures[ty], structures), ()


def structure_type(structure, structures):
    """A structure of the manifest as a numpy type, with its offsets."""
    return numpy.dtype(
        {
            "names": [field["name"] for field in structure["fields"]],
            "formats": [field_type(field["type"], structures) for field in structure["fields"]],
            "offsets": [field["offset"] for field in structure["fields"]],
            "itemsize": structure["bytes"],
        }
    )


class Pack:
    """The module for this GPU, with what the manifest says of it."""

    def __init__(self, folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        structures = {structure["name"]: structure for structure in manifest["structures"]}
        self.types = {name: structure_type(structure, structures) for name, structure in structures.items()}
        self.bytes = {name: structure["bytes"] for name, structure in structures.items()}
        self.constants = {constant["name"]: constant["value"] for constant in manifest["constants"]}
        target = "sm_90a" if cupy.cuda.Device().compute_capability == "90" else "sm_80"
        module = next(module for module in manifest["modules"] if module["target"] == target)
        self.kernels = {kernel["name"]: kernel for kernel in module["kernels"]}
        cubin = folder / f"ringseal_{target}.cubin"
        self.path = cubin if cubin.exists() else folder / module["file"]
        self.module = cupy.RawModule(path=str(self.path))

    def launch(self, name, blocks, **fields):
        """Launches a kernel with the given fields of its parameter structure, the rest zero, and waits."""
        kernel = self.kernels[name]
        parameters = numpy.zeros((), self.types[kernel["parameter"]])
        for field, value in fields.items():
            parameters[field] = value
        function = self.module.get_function(name)
        function.max_dynamic_shared_size_bytes = kernel["shared_bytes"]
        # CuPy passes a numpy scalar of any type by value.
        function((blocks,), (kernel["threads"],), (parameters[()],), shared_mem=kernel["shared_bytes"])
        cupy.cuda.get_current_stream().synchronize()


def substitute(x):
    """The S-box, computed (FIPS 197, 5.1.1)."""

    def multiply(a, b):
        product = 0
        while b:
            product ^= a if b & 1 else 0
            a = (a << 1) ^ (0x11B if a & 0x80 else 0)
            b >>= 1
        return product

    inverse = next((y for y in range(1, 256) if multiply(x, y) == 1), 0)
    s = 0x63
    for turn in range(5):
        s ^= (inverse << turn | inverse >> (8 - turn)) & 0xFF
    return s


def expand_key(key):
    """The key schedule (FIPS 197, 5.2) as 60 little-endian words; zeros after the last."""
    length = len(key) // 4
    words = [key[4 * i : 4 * i + 4] for i in range(length)]
    constant = 1
    for i in range(length, 4 * (length + 7)):
        word = words[-1]
        if i % length == 0:
            word = bytes(substitute(b) for b in word[1:] + word[:1])
            word = bytes([word[0] ^ constant]) + word[1:]
            constant = (constant << 1) ^ (0x11B if constant & 0x80 else 0)
        elif length == 8 and i % length == 4:
            word = bytes(substitute(b) for b in word)
        words.append(bytes(a ^ b for a, b in zip(word, words[i - length])))
    return numpy.frombuffer(b"".join(words).ljust(240, b"\0"), "<u4")


def upload(data):
    """Bytes in device memory, with zeros to a multiple of 16; allocations are aligned to 512."""
    padded = data.ljust(max(16, (len(data) + 15) // 16 * 16), b"\0")
    return cupy.asarray(numpy.frombuffer(padded, "u1"))


failures = 0


def expect(what, got, wanted):
    global failures
    print(f"{what:60} {'ok' if got == wanted else 'WRONG'}")
    failures += got != wanted


def ctr(pack, key, counter, data):
    source = upload(data)
    output = cupy.zeros_like(source)
    pack.launch(
        f"aes{8 * len(key)}_ctr_xor",
        1,
        keys=expand_key(key),
        counter=numpy.frombuffer(counter, "<u4"),
        input=source.data.ptr,
        output=output.data.ptr,
        bytes=len(data),
        carry=1,  # SP 800-38A counts in all 128 bits
    )
    return output.get().tobytes()[: len(data)]


def ghash_key(pack, key):
    """H = E(K, 0), the first 16 bytes of keystream from counter 0; then the matrices made from it."""
    h = cupy.zeros(16, "u1")
    pack.launch(f"aes{8 * len(key)}_ctr_keystream", 1, keys=expand_key(key), output=h.data.ptr, bytes=16)
    matrices = cupy.zeros(pack.bytes["GhashKey"], "u1")
    pack.launch("ghash_key", pack.constants["GHASH_KEY_GRID"], h=h.get().view("<u4"), key=matrices.data.ptr)
    return matrices


def gcm(pack, what, key, nonce, plaintext, aad, ciphertext, tag):
    matrices = ghash_key(pack, key)
    source, data = upload(plaintext), upload(aad)
    output, opened = cupy.zeros_like(source), cupy.zeros_like(source)
    tags, verdict = cupy.zeros(16, "u1"), cupy.zeros(1, "u4")

    def run(kernel, origin, target):
        verdict.fill(0)
        record = numpy.zeros((), pack.types["Record"])
        record["input"], record["output"] = origin.data.ptr, target.data.ptr
        record["aad"], record["aad_length"] = data.data.ptr, len(aad)
        record["tag"], record["verdict"] = tags.data.ptr, verdict.data.ptr
        record["length"] = len(plaintext)
        record["j0"] = numpy.frombuffer(nonce + struct.pack(">I", 1), "<u4")
        records = upload(record.tobytes())
        pack.launch(
            f"{kernel}_{8 * len(key)}",
            1,
            keys=expand_key(key),
            ghash_key=matrices.data.ptr,
            records=records.data.ptr,
            count=1,
        )
        return target.get().tobytes()[: len(plaintext)]

    expect(what, run("gcm_seal_records", source, output), ciphertext)
    expect("  tag", tags.get().tobytes(), tag)
    expect("  opened", run("gcm_open_records", output, opened), plaintext)
    expect("  verdict", int(verdict[0]), pack.constants["VERIFIED"])
    output[7] ^= 1
    expect("  forged: zeros", run("gcm_open_records", output, opened), bytes(len(plaintext)))
    expect("  verdict", int(verdict[0]), pack.constants["FORGED"])


def main():
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER   (what `ringseal ptx --out FOLDER` wrote)")
    pack = Pack(pathlib.Path(sys.argv[1]))
    print(f"loaded {pack.path}")
    unhex = bytes.fromhex

    # NIST SP 800-38A, F.5.1 and F.5.5.
    counter = unhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    text = unhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    expect(
        "SP 800-38A F.5.1, AES-128-CTR",
        ctr(pack, unhex("2b7e151628aed2a6abf7158809cf4f3c"), counter, text),
        unhex(
            "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
            "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
        ),
    )
    expect(
        "SP 800-38A F.5.5, AES-256-CTR",
        ctr(pack, unhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"), counter, text),
        unhex(
            "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
            "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
        ),
    )
    if "gcm_seal_records_128" in pack.kernels:
        # CAVP gcmEncryptExtIV128.rsp and 256: IVlen 96, PTlen 408, AADlen 160, Taglen 128, Count 0.
        gcm(
            pack,
            "CAVP, AES-128-GCM, 51 bytes",
            unhex("fe47fcce5fc32665d2ae399e4eec72ba"),
            unhex("5adb9609dbaeb58cbd6e7275"),
            unhex(
                "7c0e88c88899a779228465074797cd4c2e1498d259b54390b85e3eef1c02df60"
                "e743f1b840382c4bccaf3bafb4ca8429bea063"
            ),
            unhex("88319d6e1d3ffa5f987199166c8a9b56c2aeba5a"),
            unhex(
                "98f4826f05a265e6dd2be82db241c0fbbbf9ffb1c173aa83964b7cf539304373"
                "6365253ddbc5db8778371495da76d269e5db3e"
            ),
            unhex("291ef1982e4defedaa2249f898556b47"),
        )
        gcm(
            pack,
            "CAVP, AES-256-GCM, 51 bytes",
            unhex("24501ad384e473963d476edcfe08205237acfd49b5b8f33857f8114e863fec7f"),
            unhex("9ff18563b978ec281b3f2794"),
            unhex(
                "27f348f9cdc0c5bd5e66b1ccb63ad920ff2219d14e8d631b3872265cf117ee86"
                "757accb158bd9abb3868fdc0d0b074b5f01b2c"
            ),
            unhex("adb5ec720ccf9898500028bf34afccbcaca126ef"),
            unhex(
                "eb7cb754c824e8d96f7c6d9b76c7d26fb874ffbf1d65c6f64a698d839b0b0614"
                "5dae82057ad55994cf59ad7f67c0fa5e85fab8"
            ),
            unhex("bc95c532fecc594c36d1550286a7a3f0"),
        )
    else:
        print("no GCM kernels for this GPU: skipped")
    print(f"{failures} WRONG" if failures else "all right")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
