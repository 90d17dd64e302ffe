/*
 * ringseal: collectives in which every byte that leaves a rank is sealed with AES-GCM.
 *
 * Made from capi/src by cbindgen: change it there.
 *
 * Functions that can fail return a status: RINGSEAL_STATUS_OK, or another and a message for people, which
 * ringseal_last_error() gives to the thread that made the call. Handles are made by _create functions and freed by
 * _destroy functions; after a failed _create the handle is NULL. Nothing is thrown or unwound into the caller.
 *
 * Threads: any function may be called from any thread. Any number of threads may use a ringseal_aead or a
 * ringseal_gpu_aead at once. One thread at a time may use a ringseal_communicator, ringseal_gpu_communicator or
 * ringseal_gpu_copy; a second one gets RINGSEAL_STATUS_BUSY. Destroy a handle when no thread is using it.
 */


#ifndef RINGSEAL_H
#define RINGSEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The version of the interface that this header describes. A library with another number has another interface:
 * compare it with ringseal_abi_version() where the library is loaded at run time. Functions, numbers of enumerations, and fields
 * at the end of options may be added without another version: options say by struct_bytes which fields they have, and a
 * library takes those of earlier headers.
 */
#define RINGSEAL_ABI_VERSION 1

/**
 * Bytes of a tag.
 */
#define RINGSEAL_TAG_BYTES 16

/**
 * Bytes of a group secret.
 */
#define RINGSEAL_SECRET_BYTES 32

/**
 * Bytes that each rank gives in a gather.
 */
#define RINGSEAL_GATHER_BYTES 1024

/**
 * What a call came to. Zero is success; further numbers may be added.
 */
enum ringseal_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Done.
   */
  RINGSEAL_STATUS_OK = 0,
  /**
   * A tag did not verify: the data were changed, or key, IV or additional data are others. Outputs are zeros.
   */
  RINGSEAL_STATUS_AUTHENTICATION = 1,
  /**
   * A rank did not deliver in time.
   */
  RINGSEAL_STATUS_DEADLINE = 2,
  /**
   * Another rank failed first.
   */
  RINGSEAL_STATUS_ABORTED = 3,
  /**
   * The ranks did not come to a session: one is missing, has another secret, or other options.
   */
  RINGSEAL_STATUS_HANDSHAKE = 4,
  /**
   * The communicator failed before and carries no data until it is rekeyed.
   */
  RINGSEAL_STATUS_POISONED = 5,
  /**
   * An argument is null, out of its domain, or doesn't fit the others.
   */
  RINGSEAL_STATUS_INVALID_ARGUMENT = 6,
  /**
   * A length is beyond a limit of the standard.
   */
  RINGSEAL_STATUS_LENGTH = 7,
  /**
   * A key has encrypted all that it may; rekey.
   */
  RINGSEAL_STATUS_KEY_EXHAUSTED = 8,
  /**
   * The backend can't do that.
   */
  RINGSEAL_STATUS_UNSUPPORTED = 9,
  /**
   * There is no usable GPU or driver.
   */
  RINGSEAL_STATUS_NO_DEVICE = 10,
  /**
   * A CUDA call failed.
   */
  RINGSEAL_STATUS_CUDA = 11,
  /**
   * The system failed to read, write, or connect.
   */
  RINGSEAL_STATUS_IO = 12,
  /**
   * The system gave no random bytes.
   */
  RINGSEAL_STATUS_RANDOMNESS = 13,
  /**
   * The handle is in use by another thread.
   */
  RINGSEAL_STATUS_BUSY = 14,
  /**
   * A mistake in the library. Please report it.
   */
  RINGSEAL_STATUS_INTERNAL = 15,
  /**
   * A rank's process ended, or the connection to it. Make a new group.
   */
  RINGSEAL_STATUS_LOST = 16,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ringseal_status ringseal_status;
#else
typedef int32_t ringseal_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Element types, little-endian in memory.
 */
enum ringseal_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * IEEE 754 binary32.
   */
  RINGSEAL_DTYPE_F32 = 0,
  /**
   * IEEE 754 binary64.
   */
  RINGSEAL_DTYPE_F64 = 1,
  /**
   * IEEE 754 binary16; accumulated in binary32 within a step.
   */
  RINGSEAL_DTYPE_F16 = 2,
  /**
   * bfloat16; accumulated in binary32 within a step.
   */
  RINGSEAL_DTYPE_BF16 = 3,
  /**
   * Signed 8-bit, wrapping.
   */
  RINGSEAL_DTYPE_I8 = 4,
  /**
   * Unsigned 8-bit, wrapping.
   */
  RINGSEAL_DTYPE_U8 = 5,
  /**
   * Signed 32-bit, wrapping.
   */
  RINGSEAL_DTYPE_I32 = 6,
  /**
   * Unsigned 32-bit, wrapping.
   */
  RINGSEAL_DTYPE_U32 = 7,
  /**
   * Signed 64-bit, wrapping.
   */
  RINGSEAL_DTYPE_I64 = 8,
  /**
   * Unsigned 64-bit, wrapping.
   */
  RINGSEAL_DTYPE_U64 = 9,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ringseal_dtype ringseal_dtype;
#else
typedef uint32_t ringseal_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Reductions.
 */
enum ringseal_op
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Sum; integers wrap.
   */
  RINGSEAL_OP_SUM = 0,
  /**
   * Sum divided once by the number of ranks at the end.
   */
  RINGSEAL_OP_AVG = 1,
  /**
   * Minimum; NaN on any rank gives NaN.
   */
  RINGSEAL_OP_MIN = 2,
  /**
   * Maximum; NaN on any rank gives NaN.
   */
  RINGSEAL_OP_MAX = 3,
  /**
   * Product; integers wrap.
   */
  RINGSEAL_OP_PROD = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ringseal_op ringseal_op;
#else
typedef uint32_t ringseal_op;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What protects records.
 */
enum ringseal_protection
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * AES-256-GCM.
   */
  RINGSEAL_PROTECTION_AES256_GCM = 0,
  /**
   * AES-128-GCM.
   */
  RINGSEAL_PROTECTION_AES128_GCM = 1,
  /**
   * Nothing: plaintext leaves the rank. For comparison only.
   */
  RINGSEAL_PROTECTION_NONE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ringseal_protection ringseal_protection;
#else
typedef uint32_t ringseal_protection;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How collectives are done.
 */
enum ringseal_schedule
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * The library's choice: the relay ring on host memory; on GPUs the exchange of two ranks, else the relay ring.
   */
  RINGSEAL_SCHEDULE_DEFAULT = 0,
  /**
   * A ring whose finished chunks travel on as their owners sealed them.
   */
  RINGSEAL_SCHEDULE_RELAY_RING = 1,
  /**
   * A ring that opens and seals at each hop.
   */
  RINGSEAL_SCHEDULE_RING = 2,
  /**
   * Two hops, for small vectors.
   */
  RINGSEAL_SCHEDULE_DIRECT = 3,
  /**
   * A tree.
   */
  RINGSEAL_SCHEDULE_TREE = 4,
  /**
   * Each rank sends its whole vector to all others: one hop, for two ranks.
   */
  RINGSEAL_SCHEDULE_EXCHANGE = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ringseal_schedule ringseal_schedule;
#else
typedef uint32_t ringseal_schedule;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What carries records between the processes of a GPU communicator.
 */
enum ringseal_transport
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * The GPUs themselves, which reach each other's memory: those of one machine.
   */
  RINGSEAL_TRANSPORT_PEER = 0,
  /**
   * NCCL's send and receive, for ranks with a GPU each on any machines that NCCL reaches. libnccl.so.2 is loaded when it
   * is first used. Run on two H200s of one machine, not yet on several machines.
   */
  RINGSEAL_TRANSPORT_NCCL = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ringseal_transport ringseal_transport;
#else
typedef uint32_t ringseal_transport;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What ringseal_gpu_open() and ringseal_gpu_gmac_verify() write to device memory.
 */
enum ringseal_verdict
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Not known: the stream is not there yet, or the work failed to run. Never take it for a success.
   */
  RINGSEAL_VERDICT_PENDING = 0,
  /**
   * The tag is right.
   */
  RINGSEAL_VERDICT_VERIFIED = 1,
  /**
   * The tag is wrong: the data were changed, or key, IV or additional data are others. The plaintext is zeros.
   */
  RINGSEAL_VERDICT_FORGED = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ringseal_verdict ringseal_verdict;
#else
typedef uint32_t ringseal_verdict;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * An AES key, expanded. Any number of threads may use one at once.
 */
typedef struct ringseal_aead ringseal_aead;

/**
 * One rank of a group. A handle may move between threads, but only one may use it at a time: a second one gets
 * RINGSEAL_STATUS_BUSY. Different ranks' handles are independent.
 */
typedef struct ringseal_communicator ringseal_communicator;

/**
 * An AES key, expanded on a GPU. Any number of threads may use one at once, on any streams; on the GPU, what is queued
 * with one key runs one after another.
 */
typedef struct ringseal_gpu_aead ringseal_gpu_aead;

/**
 * One rank of a group of processes with GPUs. One thread at a time may use a handle: a second one gets
 * RINGSEAL_STATUS_BUSY.
 */
typedef struct ringseal_gpu_communicator ringseal_gpu_communicator;

/**
 * Both ends, in host memory and in one GPU's, of sealed copies in both directions. One thread at a time may use a handle: a
 * second one gets RINGSEAL_STATUS_BUSY.
 */
typedef struct ringseal_gpu_copy ringseal_gpu_copy;

/**
 * How a group works. A field that is zero or NULL has its default, except `struct_bytes`: set it to
 * sizeof(ringseal_options). All but backend, timeout and host must be alike on all ranks.
 */
typedef struct ringseal_options {
  /**
   * sizeof(ringseal_options).
   */
  size_t struct_bytes;
  /**
   * A number of enum ringseal_protection.
   */
  uint32_t protection;
  /**
   * A number of enum ringseal_schedule.
   */
  uint32_t schedule;
  /**
   * Where the cipher runs: "cpu" (default), "cuda", "emulated" or "auto".
   */
  const char *backend;
  /**
   * Bytes of a record, a multiple of 16. Default: 65536.
   */
  size_t record_bytes;
  /**
   * How long to wait for a rank, in milliseconds. Default: 30000.
   */
  uint64_t timeout_ms;
  /**
   * Bytes that a key may encrypt before the next one is used. Default: 389 GB.
   */
  uint64_t key_bytes;
  /**
   * An IP address of this machine by which the other ranks reach it. Default: 127.0.0.1; with a rendezvous, the
   * address that it was reached from.
   */
  const char *host;
  /**
   * Of a GPU communicator: all-reduces whose keystream is kept at once, made ahead of time by
   * ringseal_gpu_make_keystream(). Default: none is kept.
   */
  size_t keystream_collectives;
  /**
   * Bytes of the longest of these all-reduces; what a longer one has beyond finds no keystream.
   */
  size_t keystream_bytes;
  /**
   * Multiprocessors that make keystream at a time. Default: all.
   */
  size_t keystream_makers;
  /**
   * Of a GPU communicator: a number of enum ringseal_transport. Other communicators take none but the default.
   */
  uint32_t transport;
  /**
   * With RINGSEAL_TRANSPORT_NCCL: ranks of a node, which must divide the number of ranks; rank r is in node r /
   * node_ranks. All-reduces sum inside nodes first, as RINGSEAL_TRANSPORT_PEER does, and then between them by NCCL.
   * Default: there are no nodes.
   */
  size_t node_ranks;
  /**
   * Of a GPU communicator: multiprocessors that a rank's collectives may take, so that what computes beside them has the
   * others. Default: all. The rank with the fewest decides for all.
   */
  size_t sm_budget;
} ringseal_options;

/**
 * Gathers `bytes` bytes of every rank at every rank: gives `message`, and fills `gathered`, `bytes` times the number of
 * ranks, in the order of the ranks. MPI_Allgather does just this. `bytes` is RINGSEAL_GATHER_BYTES on all ranks and in
 * all calls. `user` is what was given with the function. Returns 0 when done; when a rank does not come within
 * `timeout_ms`, anything else. What is gathered needs no protection.
 */
typedef int32_t (*ringseal_gather)(void *user,
                                   const uint8_t *message,
                                   size_t bytes,
                                   uint8_t *gathered,
                                   uint64_t timeout_ms);

/**
 * How sealed copies are made. A field that is zero has its default, except `struct_bytes`: set it to
 * sizeof(ringseal_copy_options).
 */
typedef struct ringseal_copy_options {
  /**
   * sizeof(ringseal_copy_options).
   */
  size_t struct_bytes;
  /**
   * A number of enum ringseal_protection, but not RINGSEAL_PROTECTION_NONE.
   */
  uint32_t protection;
  /**
   * Bytes sealed as one message: a multiple of 16, at most 1 GiB. Default: 65536.
   */
  size_t record_bytes;
  /**
   * Records that are moved at once. Default: 64.
   */
  size_t piece_records;
  /**
   * Pieces under way at once; staging memory for them is pinned on the host, and as much is taken on the device.
   * Default: 8.
   */
  size_t slots;
  /**
   * Threads that seal and open on the host; each copy starts its own. Default: one for each processor but one.
   */
  size_t threads;
  /**
   * Bytes that a key may encrypt before the next one is used. Default: 389 GB.
   */
  uint64_t key_bytes;
} ringseal_copy_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the interface that the library has: RINGSEAL_ABI_VERSION of its header.
 */
uint32_t ringseal_abi_version(void);

/**
 * The library's version, such as "0.1.0". Static: don't free it.
 */
const char *ringseal_version(void);

/**
 * Expands a key of 16, 24 or 32 bytes (AES-128, AES-192, AES-256) and writes its handle to `out`. `backend` is "cpu",
 * "cuda" (data still lie in host memory), "emulated" or "auto"; NULL is "cpu". The caller still owns, and should
 * erase, the key's bytes.
 */
ringseal_status ringseal_aead_create(const uint8_t *key,
                                     size_t key_bytes,
                                     const char *backend,
                                     struct ringseal_aead **out);

/**
 * Erases and frees a key. NULL is allowed.
 */
void ringseal_aead_destroy(struct ringseal_aead *aead);

/**
 * Encrypts `bytes` bytes from `plaintext` to `ciphertext`, and writes the tag's RINGSEAL_TAG_BYTES bytes to `tag`
 * (NIST SP 800-38D, 7.1). The two may be the same address, but not overlap otherwise. Never use an IV twice with one
 * key. On failure nothing is written, or zeros.
 */
ringseal_status ringseal_seal(const struct ringseal_aead *aead,
                              const uint8_t *iv,
                              size_t iv_bytes,
                              const uint8_t *aad,
                              size_t aad_bytes,
                              const uint8_t *plaintext,
                              uint8_t *ciphertext,
                              size_t bytes,
                              uint8_t *tag);

/**
 * Verifies `bytes` bytes of `ciphertext` with a tag of `tag_bytes` bytes, which must be RINGSEAL_TAG_BYTES, and decrypts
 * them to `plaintext` (NIST SP 800-38D, 7.2). The two may be the same address, but not overlap otherwise. If the tag
 * does not verify, `plaintext` is zeros.
 */
ringseal_status ringseal_open(const struct ringseal_aead *aead,
                              const uint8_t *iv,
                              size_t iv_bytes,
                              const uint8_t *aad,
                              size_t aad_bytes,
                              const uint8_t *ciphertext,
                              uint8_t *plaintext,
                              size_t bytes,
                              const uint8_t *tag,
                              size_t tag_bytes);

/**
 * Writes the GMAC of `aad` to `tag`, RINGSEAL_TAG_BYTES bytes (NIST SP 800-38D, 3). Never use an IV twice with one key.
 */
ringseal_status ringseal_gmac(const struct ringseal_aead *aead,
                              const uint8_t *iv,
                              size_t iv_bytes,
                              const uint8_t *aad,
                              size_t aad_bytes,
                              uint8_t *tag);

/**
 * Verifies a GMAC.
 */
ringseal_status ringseal_gmac_verify(const struct ringseal_aead *aead,
                                     const uint8_t *iv,
                                     size_t iv_bytes,
                                     const uint8_t *aad,
                                     size_t aad_bytes,
                                     const uint8_t *tag,
                                     size_t tag_bytes);

/**
 * Makes a group of `ranks` ranks in this process, and writes a handle for each to `out`, which has room for them. Use
 * each from a thread of its own. `secret` has RINGSEAL_SECRET_BYTES random bytes, or is NULL for a secret of the
 * group's own. `options` may be NULL.
 */
ringseal_status ringseal_communicator_create_group(const uint8_t *secret_bytes,
                                                   size_t ranks,
                                                   const struct ringseal_options *group_options,
                                                   struct ringseal_communicator **out);

/**
 * Joins a group of `ranks` ranks, each in a process of its own, as rank `rank`, and writes its handle to `out`. Returns
 * when all have joined. `secret` has RINGSEAL_SECRET_BYTES bytes, the same on all ranks, from attestation or another
 * trusted channel. The ranks find each other by `gather`, which is called here and in ringseal_communicator_rekey(), on
 * the calling thread, always with `user`; then they are linked by TCP.
 */
ringseal_status ringseal_communicator_create(const uint8_t *secret_bytes,
                                             size_t rank,
                                             size_t ranks,
                                             const struct ringseal_options *group_options,
                                             ringseal_gather gather,
                                             void *user,
                                             struct ringseal_communicator **out);

/**
 * As ringseal_communicator_create(), for ranks that have no store in common: they find each other at `address`, which is
 * "unix:PATH" or "HOST:PORT". Rank 0 listens there, the others connect, and may come before it.
 */
ringseal_status ringseal_communicator_create_rendezvous(const uint8_t *secret_bytes,
                                                        size_t rank,
                                                        size_t ranks,
                                                        const struct ringseal_options *group_options,
                                                        const char *address,
                                                        struct ringseal_communicator **out);

/**
 * Frees a rank and closes its links. NULL is allowed. The other ranks' collectives fail.
 */
void ringseal_communicator_destroy(struct ringseal_communicator *communicator);

/**
 * Writes which rank this is, of how many, and whether it must be rekeyed because a collective has failed. Each of the
 * three may be NULL.
 */
ringseal_status ringseal_communicator_info(const struct ringseal_communicator *communicator,
                                           size_t *rank,
                                           size_t *ranks,
                                           bool *poisoned);

/**
 * Waits at most this long for a rank from now on, in milliseconds, at least 1.
 */
ringseal_status ringseal_communicator_set_timeout(const struct ringseal_communicator *communicator,
                                                  uint64_t timeout_ms);

/**
 * Starts a new session with new keys, together with all other ranks. Ends the poisoning after a failure, unless a rank
 * or its link is gone: then make a new group.
 */
ringseal_status ringseal_communicator_rekey(const struct ringseal_communicator *communicator);

/**
 * Writes which elements, from `begin` to before `end`, of a vector of `count` are rank `rank`'s chunk in a
 * reduce-scatter and an all-gather. Any count is allowed; the first chunks are one element longer where the ranks don't
 * divide it.
 */
ringseal_status ringseal_chunk(size_t count,
                               size_t ranks,
                               size_t rank,
                               size_t *begin,
                               size_t *end);

/**
 * Reduces `input` over all ranks into every rank's `output`, `count` elements each, which may be the same address or
 * apart. All ranks get the same bits. On failure `output` is zeros, and the communicator must be rekeyed. `dtype` is a
 * number of enum ringseal_dtype, `op` of enum ringseal_op. All ranks call the same collectives in the same order.
 */
ringseal_status ringseal_all_reduce(const struct ringseal_communicator *communicator,
                                    const void *input,
                                    void *output,
                                    size_t count,
                                    uint32_t dtype,
                                    uint32_t op);

/**
 * Reduces `input`, `count` elements, over all ranks; `output` gets this rank's chunk of the result: ringseal_chunk()
 * says which elements that are. Both may be apart, or `output` the chunk's own place in `input`. On failure the chunk
 * is zeros, and the communicator must be rekeyed.
 */
ringseal_status ringseal_reduce_scatter(const struct ringseal_communicator *communicator,
                                        const void *input,
                                        void *output,
                                        size_t count,
                                        uint32_t dtype,
                                        uint32_t op);

/**
 * Gathers all ranks' chunks, of which `input` is this rank's, to every rank's `output`, `count` elements:
 * ringseal_chunk() says which elements each rank gives. Both may be apart, or `input` the chunk's own place in
 * `output`. On failure `output` is zeros, and the communicator must be rekeyed.
 */
ringseal_status ringseal_all_gather(const struct ringseal_communicator *communicator,
                                    const void *input,
                                    void *output,
                                    size_t count,
                                    uint32_t dtype);

/**
 * Gives rank `root`'s `input` to every rank's `output`, `count` elements. On the root both may be the same address or
 * apart; the other ranks' `input` is not looked at. On failure `output` is zeros, and the communicator must be rekeyed.
 */
ringseal_status ringseal_broadcast(const struct ringseal_communicator *communicator,
                                   const void *input,
                                   void *output,
                                   size_t count,
                                   uint32_t dtype,
                                   size_t root);

/**
 * Joins a group of `ranks` processes as rank `rank`, on the GPU that CUDA numbers `device`, in its primary context, and
 * writes the handle to `out`. `max_bytes` is the length of the longest vector that will be reduced, the same on all ranks;
 * mailboxes take four times as much device memory, by a tree six times, by an exchange twice for each other rank. Otherwise
 * as ringseal_communicator_create(); the options' backend and host have no meaning.
 *
 * By default the processes are of one machine, each with a GPU or a share of one. With RINGSEAL_TRANSPORT_NCCL as the
 * options' transport they are on any machines that NCCL reaches, each with a GPU of its own: schedules are then rings, and the
 * exchange of two ranks, the mailboxes take twice as much memory, no keystream is kept, and nothing can be captured in a graph. The call fails on all ranks, with
 * RINGSEAL_STATUS_UNSUPPORTED on one that finds no NCCL, and with RINGSEAL_STATUS_INVALID_ARGUMENT where two ranks are on one
 * GPU. With node_ranks too there are all-reduces only, which wait until they are done.
 */
ringseal_status ringseal_gpu_communicator_create(const uint8_t *secret_bytes,
                                                 size_t rank,
                                                 size_t ranks,
                                                 size_t device,
                                                 size_t max_bytes,
                                                 const struct ringseal_options *group_options,
                                                 ringseal_gather gather,
                                                 void *user,
                                                 struct ringseal_gpu_communicator **out);

/**
 * Leaves the group at once and frees the handle, after this rank's own work on the GPU. NULL is allowed. The other ranks'
 * collectives fail: after ones that went well, call ringseal_gpu_communicator_close().
 */
void ringseal_gpu_communicator_destroy(struct ringseal_gpu_communicator *communicator);

/**
 * Leaves in good order, together with all other ranks, and frees the handle, also when it fails.
 */
ringseal_status ringseal_gpu_communicator_close(struct ringseal_gpu_communicator *communicator);

/**
 * Queues an all-reduce of `count` elements in device memory on the CUDA stream `stream` (a cudaStream_t or CUstream; NULL
 * is the default stream), and doesn't wait. A rank's collectives run one after another, on whatever streams they are; of a
 * captured graph's launches the caller must see to that. `input` and `output` may be the same address or apart. When the stream has
 * passed it, ringseal_gpu_outcome() says whether it went well; until that has said so, don't use `output`.
 */
ringseal_status ringseal_gpu_all_reduce(const struct ringseal_gpu_communicator *communicator,
                                        const void *input,
                                        void *output,
                                        size_t count,
                                        uint32_t dtype,
                                        uint32_t op,
                                        void *stream);

/**
 * As ringseal_gpu_all_reduce(), but `output` gets this rank's chunk alone: ringseal_chunk() says which elements. In place,
 * `output` is the chunk's address in `input`, whose other elements stay.
 */
ringseal_status ringseal_gpu_reduce_scatter(const struct ringseal_gpu_communicator *communicator,
                                            const void *input,
                                            void *output,
                                            size_t count,
                                            uint32_t dtype,
                                            uint32_t op,
                                            void *stream);

/**
 * Queues the gathering of a vector of `count` elements in every rank's `output`; each rank gives its chunk of it at `input`:
 * ringseal_chunk() says which elements. In place, `input` is the chunk's address in `output`. Otherwise as
 * ringseal_gpu_all_reduce().
 */
ringseal_status ringseal_gpu_all_gather(const struct ringseal_gpu_communicator *communicator,
                                        const void *input,
                                        void *output,
                                        size_t count,
                                        uint32_t dtype,
                                        void *stream);

/**
 * Queues the copying of `count` elements at rank `root`'s `input` to every rank's `output`. The other ranks' `input` is not
 * looked at and may be NULL. Otherwise as ringseal_gpu_all_reduce().
 */
ringseal_status ringseal_gpu_broadcast(const struct ringseal_gpu_communicator *communicator,
                                       const void *input,
                                       void *output,
                                       size_t count,
                                       uint32_t dtype,
                                       size_t root,
                                       void *stream);

/**
 * Whether keystream made ahead of time shortens a training's iterations whose all-reduces take `sm_budget` of a GPU's
 * `multiprocessors` (the options' sm_budget; 0: all): where they are at most a quarter, as measured beside matrix products on
 * two H200s. A GPU that idles between iterations can gain with more.
 */
bool ringseal_keystream_pays(size_t sm_budget,
                             size_t multiprocessors);

/**
 * Has keystream made, on a stream of low priority of the library's own, for the next `count` collectives: all-reduces of
 * F32, F16 or BF16 sums or averages, of `bytes[0]`, `bytes[1]`, ... bytes, in this order. Doesn't wait. Writes to `made`,
 * unless it is NULL, for how many of them, from the first on, there is or will be keystream: no more than the options keep,
 * and none once a collective was captured in a graph, until the communicator is rekeyed.
 *
 * A ring uses it when all of the collective's is ready as it is launched, an exchange what is ready when it gets to a record;
 * else it is made on the way. What was made for another collective or length is wiped unused, and what earlier collectives
 * have used is wiped before, if they are over; it takes room until then. Results are the same, and other ranks need not do
 * it. The options must keep keystream (keystream_collectives), which sealed rings and relay rings can, and exchanges of two
 * ranks.
 */
ringseal_status ringseal_gpu_make_keystream(const struct ringseal_gpu_communicator *communicator,
                                            const size_t *bytes,
                                            size_t count,
                                            size_t *made);

/**
 * Waits until all keystream that was asked for is made, collectives with keystream are over, and all that was used is wiped.
 */
ringseal_status ringseal_gpu_wait_for_keystream(const struct ringseal_gpu_communicator *communicator);

/**
 * Writes how many records so far, modulo 2^32, found no keystream, of this rank's collectives with some. Wait for the
 * collectives' stream first.
 */
ringseal_status ringseal_gpu_keystream_misses(const struct ringseal_gpu_communicator *communicator,
                                              uint32_t *misses);

/**
 * Says how the collectives went that the rank's stream has passed: synchronize the stream first. With
 * RINGSEAL_TRANSPORT_NCCL don't: it waits for the collectives so far itself, and gives up on a rank that stays away, for
 * which the stream would wait for ever. After a failure the outputs are wiped, and the communicator carries no data until it
 * is rekeyed.
 */
ringseal_status ringseal_gpu_outcome(const struct ringseal_gpu_communicator *communicator);

/**
 * As ringseal_communicator_rekey(), after all work on the device.
 */
ringseal_status ringseal_gpu_communicator_rekey(const struct ringseal_gpu_communicator *communicator);

/**
 * Writes whether the communicator must be rekeyed because a collective has failed.
 */
ringseal_status ringseal_gpu_communicator_poisoned(const struct ringseal_gpu_communicator *communicator,
                                                   bool *poisoned);

/**
 * Expands a key of 16, 24 or 32 bytes (AES-128, AES-192, AES-256) on the GPU that CUDA numbers `device`, in its primary
 * context (the one that the CUDA runtime uses), and writes its handle to `out`. Waits for the GPU, and loads the kernels:
 * keep the handle. The caller still owns, and should erase, the key's bytes. RINGSEAL_STATUS_NO_DEVICE without a usable
 * GPU of compute capability 8.0 or newer.
 */
ringseal_status ringseal_gpu_aead_create(const uint8_t *key,
                                         size_t key_bytes,
                                         size_t device,
                                         struct ringseal_gpu_aead **out);

/**
 * Erases and frees a key, after all work on its device. NULL is allowed.
 */
void ringseal_gpu_aead_destroy(struct ringseal_gpu_aead *aead);

/**
 * Queues, on the CUDA stream `stream` (a cudaStream_t or CUstream; NULL is the default stream), the encryption of `bytes`
 * bytes of device memory from `plaintext` to `ciphertext`, and doesn't wait (NIST SP 800-38D, 7.1). The tag's
 * RINGSEAL_TAG_BYTES bytes go to `tag`. `aad`, `plaintext`, `ciphertext` and `tag` are addresses in memory of the key's
 * device, `iv` is host memory, of which nothing is needed after the call.
 *
 * The two texts may be the same address, but not overlap otherwise. Any alignment will do, and multiples of 16 are fast;
 * `tag` must be a multiple of 4. Ciphertext and tag are there when the stream has passed the work. After a status other
 * than RINGSEAL_STATUS_OK, don't use them, and don't use the IV again: after RINGSEAL_STATUS_INVALID_ARGUMENT and
 * RINGSEAL_STATUS_LENGTH nothing was queued; after others the work may have run.
 *
 * Never use an IV twice with one key. So a stream that is being captured is refused: each launch of the graph would use
 * the IV again.
 */
ringseal_status ringseal_gpu_seal(const struct ringseal_gpu_aead *aead,
                                  const uint8_t *iv,
                                  size_t iv_bytes,
                                  const void *aad,
                                  size_t aad_bytes,
                                  const void *plaintext,
                                  void *ciphertext,
                                  size_t bytes,
                                  void *tag,
                                  void *stream);

/**
 * Queues the verification and decryption of `bytes` bytes of device memory from `ciphertext` to `plaintext`, and doesn't
 * wait (NIST SP 800-38D, 7.2). `tag` has RINGSEAL_TAG_BYTES bytes. Otherwise as ringseal_gpu_seal().
 *
 * The status says whether the work was queued; whether the tag is right is known when the stream has passed the work, and
 * then stands in the uint32_t at `verdict`, in device memory (or pinned host memory that the device can write), aligned to
 * 4. In the order of the stream:
 *
 * 1. The verdict becomes RINGSEAL_VERDICT_PENDING.
 * 2. The kernel writes plaintext while it computes the tag: until the stream has passed the work, `plaintext` may hold
 *    bytes that are not verified. Nothing may read them.
 * 3. If the tag is right, the verdict becomes RINGSEAL_VERDICT_VERIFIED. If it is wrong, all of `plaintext` is zeroed and
 *    then the verdict becomes RINGSEAL_VERDICT_FORGED. Where the call was in place, the ciphertext is gone in both cases;
 *    otherwise it is as it was.
 *
 * Work queued behind this on the stream runs whatever the verdict: it must look at the verdict itself, or take zeros.
 */
ringseal_status ringseal_gpu_open(const struct ringseal_gpu_aead *aead,
                                  const uint8_t *iv,
                                  size_t iv_bytes,
                                  const void *aad,
                                  size_t aad_bytes,
                                  const void *ciphertext,
                                  void *plaintext,
                                  size_t bytes,
                                  const void *tag,
                                  uint32_t *verdict,
                                  void *stream);

/**
 * Queues the GMAC of `aad_bytes` bytes of device memory at `aad`; its RINGSEAL_TAG_BYTES bytes go to `tag` (NIST SP
 * 800-38D, 3). Otherwise as ringseal_gpu_seal().
 */
ringseal_status ringseal_gpu_gmac(const struct ringseal_gpu_aead *aead,
                                  const uint8_t *iv,
                                  size_t iv_bytes,
                                  const void *aad,
                                  size_t aad_bytes,
                                  void *tag,
                                  void *stream);

/**
 * Queues the verification of a GMAC. The verdict comes as that of ringseal_gpu_open(); `aad` stays as it is.
 */
ringseal_status ringseal_gpu_gmac_verify(const struct ringseal_gpu_aead *aead,
                                         const uint8_t *iv,
                                         size_t iv_bytes,
                                         const void *aad,
                                         size_t aad_bytes,
                                         const void *tag,
                                         uint32_t *verdict,
                                         void *stream);

/**
 * Prepares sealed copies between this process's memory and that of the GPU that CUDA numbers `device`, in its primary
 * context (the one that the CUDA runtime uses), and writes the handle to `out`. The keys come from the secret's
 * RINGSEAL_SECRET_BYTES bytes and fresh randomness; the caller still owns, and should erase, the secret. Pins staging memory,
 * starts streams of its own, waits for the GPU, and loads the kernels: keep the handle. RINGSEAL_STATUS_NO_DEVICE without a
 * usable GPU of compute capability 8.0 or newer.
 */
ringseal_status ringseal_gpu_copy_create(const uint8_t *secret_bytes,
                                         size_t device,
                                         const struct ringseal_copy_options *copy_options,
                                         struct ringseal_gpu_copy **out);

/**
 * Erases the keys and frees the staging memory and the handle. Streams that were given with copies are not touched. NULL is
 * allowed.
 */
void ringseal_gpu_copy_destroy(struct ringseal_gpu_copy *copy);

/**
 * Copies `bytes` bytes of host memory at `source` to device memory at `destination`, a multiple of 16: sealed record by
 * record on host threads, moved as ciphertext through pinned staging memory, opened on the GPU. The copy begins when the
 * work that is on the CUDA stream `stream` (a cudaStream_t or CUstream; NULL is the default stream) is done, and the call
 * waits for its end: after RINGSEAL_STATUS_OK all records have verified and any stream may use `destination`.
 *
 * After another status, once the copy has begun, `destination` is zeros (if the GPU still works), and further copies are
 * RINGSEAL_STATUS_POISONED until ringseal_gpu_copy_rekey(). RINGSEAL_STATUS_INVALID_ARGUMENT and
 * RINGSEAL_STATUS_KEY_EXHAUSTED come before anything is copied and leave all as it is. A stream that is being captured is
 * refused.
 */
ringseal_status ringseal_gpu_copy_to_device(const struct ringseal_gpu_copy *copy,
                                            void *destination,
                                            const void *source,
                                            size_t bytes,
                                            void *stream);

/**
 * Copies `bytes` bytes of device memory at `source`, a multiple of 16, to host memory at `destination`: sealed on the GPU,
 * moved as ciphertext, opened on host threads. Otherwise as ringseal_gpu_copy_to_device(), and `destination` is zeros after
 * a copy that failed.
 */
ringseal_status ringseal_gpu_copy_to_host(const struct ringseal_gpu_copy *copy,
                                          void *destination,
                                          const void *source,
                                          size_t bytes,
                                          void *stream);

/**
 * Begins anew under other keys, from a secret of RINGSEAL_SECRET_BYTES bytes, which may be the same, and fresh randomness;
 * after a failed copy too.
 */
ringseal_status ringseal_gpu_copy_rekey(const struct ringseal_gpu_copy *copy,
                                        const uint8_t *secret_bytes);

/**
 * Writes whether the handle must be rekeyed because a copy has failed.
 */
ringseal_status ringseal_gpu_copy_poisoned(const struct ringseal_gpu_copy *copy, bool *poisoned);

/**
 * Why the calling thread's last call that returned a status failed; empty if it didn't. Valid until the thread's next
 * such call: don't free it.
 */
const char *ringseal_last_error(void);

/**
 * The name of a status, such as "authentication"; "unknown" for numbers that are none. Static: don't free it.
 */
const char *ringseal_status_name(int32_t status);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RINGSEAL_H */
