"""What works on device memory. The tests of it need a GPU, and PyTorch for its memory."""

import multiprocessing
import traceback

import numpy as np
import pytest

import ringseal
from ringseal import Verdict, _gpu_copy

KEY = bytes(range(32))


def test_what_is_refused_without_a_gpu():
    with pytest.raises(ringseal.UnsupportedError, match="GPU|driver"):
        ringseal.GpuAead(KEY, device=1000)
    with pytest.raises(ValueError, match="20 bytes|key"):
        ringseal.GpuAead(bytes(20))


def test_what_sealed_copies_refuse_without_a_gpu():
    with pytest.raises(ringseal.UnsupportedError, match="GPU|driver"):
        ringseal.GpuCopy(KEY, device=1000)
    with pytest.raises(ValueError, match="32 bytes"):
        ringseal.GpuCopy(bytes(31))
    with pytest.raises(ValueError, match="none"):
        ringseal.GpuCopy(KEY, protection="none")
    with pytest.raises(ValueError, match="multiple of 16"):
        ringseal.GpuCopy(KEY, record_bytes=100)
    with pytest.raises(ValueError, match="slots is -1"):
        ringseal.GpuCopy(KEY, slots=-1)


def test_what_a_transport_refuses_without_a_gpu():
    def join(ranks=4, **options):
        ringseal.GpuCommunicator(
            KEY, 0, ranks, lambda message, timeout: [message] * ranks, device=9999, max_bytes=1 << 20, **options
        )

    for options, complaint in (
        ({"transport": "mpi"}, "peer, nccl"),
        ({"node_ranks": 2}, "node_ranks"),
        ({"transport": "nccl", "node_ranks": 3}, "node_ranks"),
        ({"transport": "nccl", "node_ranks": 0}, "nodes of 0"),
        ({"sm_budget": 0}, "sm_budget 0"),
        ({"transport": "nccl", "keystream": ringseal.KeystreamAhead(1, 1024)}, "keystream"),
    ):
        with pytest.raises(ValueError, match=complaint):
            join(**options)
    for options in ({"transport": "nccl"}, {"transport": "nccl", "node_ranks": 2}):
        with pytest.raises(ringseal.UnsupportedError, match="GPU|driver"):
            join(**options)


class DeviceArray:
    """What CuPy and Numba say of their arrays."""

    def __init__(self, shape, typestr, address=4096, read_only=False, strides=None):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (address, read_only), "strides": strides, "version": 3
        }


def test_how_device_memory_may_be_given():
    def address(memory, count, writes=True):
        return _gpu_copy._device_address(memory, count, 0, writes=writes)

    assert address(12345, 99) == 12345
    assert address(DeviceArray((3, 4), "<f2"), 24) == 4096
    assert address(DeviceArray((), "<f8", read_only=True), 8, writes=False) == 4096
    for memory, complaint in (
        (DeviceArray((3, 4), "<f4"), "48 bytes"),
        (DeviceArray((3, 4), "<f2", read_only=True), "read-only"),
        (DeviceArray((3, 4), "<f2", strides=(2, 6)), "contiguous"),
        (np.zeros(24, np.uint8), "ndarray is no device memory"),
    ):
        with pytest.raises(ValueError, match=complaint):
            address(memory, 24)
    for array in (np.zeros((4, 4))[:, ::2], np.array([None]), [1, 2]):
        with pytest.raises(ValueError, match="contiguous NumPy array"):
            _gpu_copy._host_array(array)


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch


def device_bytes(torch, data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()


def test_messages_in_device_memory(torch):
    gpu, cpu = ringseal.GpuAead(KEY), ringseal.Aead(KEY)
    stream = torch.cuda.Stream()
    aad = bytes(range(21))
    for count in (0, 1, 60, 4096, 1_000_003):
        nonce = count.to_bytes(12, "little")
        plain = torch.randint(256, (max(count, 1),), dtype=torch.uint8, device="cuda")[:count]
        extra, tag = device_bytes(torch, aad), torch.zeros(16, dtype=torch.uint8, device="cuda")
        sealed, verdict = torch.full_like(plain, 7), torch.full((1,), 99, dtype=torch.int32, device="cuda")
        covers = {"aad": extra.data_ptr(), "aad_bytes": len(aad)}
        torch.cuda.synchronize()
        gpu.seal_at(nonce, plain.data_ptr(), sealed.data_ptr(), count, tag.data_ptr(), stream.cuda_stream, **covers)
        stream.synchronize()
        expected = cpu.seal(nonce, bytes(plain.cpu().numpy()), aad)
        assert (bytes(sealed.cpu().numpy()), bytes(tag.cpu().numpy())) == expected

        opened = torch.full_like(plain, 7)

        def open_with(tag):
            torch.cuda.synchronize()
            gpu.open_at(
                nonce, sealed.data_ptr(), opened.data_ptr(), count, tag.data_ptr(), verdict.data_ptr(),
                stream.cuda_stream, **covers,
            )
            stream.synchronize()
            return verdict.item()

        assert open_with(tag) == Verdict.VERIFIED
        assert torch.equal(opened, plain)
        assert open_with(tag ^ device_bytes(torch, bytes(15) + b"\x80")) == Verdict.FORGED
        assert not opened.any()


def test_gmac_in_device_memory(torch):
    gpu, cpu = ringseal.GpuAead(KEY), ringseal.Aead(KEY)
    data = bytes(range(200))
    at, stream = device_bytes(torch, data), torch.cuda.current_stream()
    tag, verdict = torch.zeros(16, dtype=torch.uint8, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    gpu.gmac_at(bytes(12), at.data_ptr(), len(data), tag.data_ptr(), stream.cuda_stream)
    stream.synchronize()
    cpu.verify_gmac(bytes(12), data, bytes(tag.cpu().numpy()))
    for count, expected in ((len(data), Verdict.VERIFIED), (len(data) - 1, Verdict.FORGED)):
        gpu.verify_gmac_at(bytes(12), at.data_ptr(), count, tag.data_ptr(), verdict.data_ptr(), stream.cuda_stream)
        stream.synchronize()
        assert verdict.item() == expected


def test_streams_of_one_key_wait_for_each_other(torch):
    gpu, cpu = ringseal.GpuAead(KEY), ringseal.Aead(KEY)
    streams = [torch.cuda.Stream() for _ in range(4)]
    plain = [torch.randint(256, (3_000_000,), dtype=torch.uint8, device="cuda") for _ in range(16)]
    tags = [torch.zeros(16, dtype=torch.uint8, device="cuda") for _ in plain]
    sealed = [torch.empty_like(each) for each in plain]
    torch.cuda.synchronize()
    for at, (source, target, tag) in enumerate(zip(plain, sealed, tags)):
        gpu.seal_at(
            at.to_bytes(12, "big"), source.data_ptr(), target.data_ptr(), source.numel(), tag.data_ptr(),
            streams[at % 4].cuda_stream,
        )
    torch.cuda.synchronize()
    for at, (source, target, tag) in enumerate(zip(plain, sealed, tags)):
        expected = cpu.seal(at.to_bytes(12, "big"), bytes(source.cpu().numpy()))
        assert (bytes(target.cpu().numpy()), bytes(tag.cpu().numpy())) == expected


def test_what_is_refused_on_a_gpu(torch):
    gpu, memory = ringseal.GpuAead(KEY), torch.zeros(256, dtype=torch.uint8, device="cuda")
    at, stream = memory.data_ptr(), torch.cuda.Stream()
    with pytest.raises(ValueError, match="overlap"):
        gpu.seal_at(bytes(12), at, at + 16, 64, at + 128, stream.cuda_stream)
    with pytest.raises(ValueError, match="multiple of 4"):
        gpu.seal_at(bytes(12), at, at, 64, at + 129, stream.cuda_stream)
    with pytest.raises(ValueError, match="verdict"):
        gpu.open_at(bytes(12), at, at, 64, at + 128, 0, stream.cuda_stream)
    with pytest.raises(ValueError, match="null"):
        gpu.seal_at(bytes(12), 0, at, 64, at + 128, stream.cuda_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        with pytest.raises(ValueError, match="captured"):
            gpu.seal_at(bytes(12), at, at, 64, at + 128, stream.cuda_stream)
        memory.add_(1)


@pytest.mark.parametrize("protection", ["aes-128-gcm", "aes-256-gcm"])
def test_sealed_copies_there_and_back(torch, protection):
    copy = ringseal.GpuCopy(KEY, protection=protection, record_bytes=4096, piece_records=5, slots=3, threads=2)
    stream = torch.cuda.Stream()
    for count in (0, 1, 5000, 1_000_003):
        sent = np.random.default_rng(count).standard_normal(count, np.float32)
        memory = torch.empty(count, device="cuda")
        with torch.cuda.stream(stream):
            memory.fill_(7.0)
            copy.to_device(sent, memory, stream.cuda_stream)
        assert np.array_equal(memory.cpu().numpy(), sent)
        with torch.cuda.stream(stream):
            memory.mul_(2.0)
            back = copy.to_host(memory, np.zeros_like(sent), stream.cuda_stream)
        assert np.array_equal(back, 2 * sent)
    # By address, of elements that NumPy doesn't have, and under other keys.
    copy.rekey(KEY)
    halves = torch.arange(100, device="cuda").to(torch.bfloat16)
    back = copy.to_host(halves.data_ptr(), np.empty(100, np.uint16))
    assert np.array_equal(back, halves.view(torch.int16).cpu().numpy().view(np.uint16))
    assert not copy.poisoned


def test_what_sealed_copies_refuse_on_a_gpu(torch):
    copy, memory, host = ringseal.GpuCopy(KEY), torch.zeros(64, dtype=torch.uint8, device="cuda"), np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="on cpu"):
        copy.to_device(host, memory.cpu())
    with pytest.raises(ValueError, match="63 bytes"):
        copy.to_device(host, memory[1:])
    with pytest.raises(ValueError, match="not contiguous"):
        copy.to_device(host[:32], memory[::2])
    with pytest.raises(ValueError, match="multiple of 16"):
        copy.to_device(host[:60], memory[4:])
    host.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        copy.to_host(memory, host)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        with pytest.raises(ValueError, match="captured"):
            copy.to_device(host, memory, stream.cuda_stream)
        memory.add_(1)
    assert not copy.poisoned


def rank_main(rank, ranks, door, outcomes):
    import torch

    try:
        def gather(message, timeout):
            door.send(message)
            assert door.poll(timeout), "the others did not come"
            return door.recv()

        with torch.cuda.device(0):
            ahead = ringseal.KeystreamAhead(collectives=2, bytes=1 << 20)
            group = ringseal.GpuCommunicator(
                KEY, rank, ranks, gather, device=0, max_bytes=1 << 20, keystream=ahead
            )
            keystream(torch, group, ranks)
            collectives(torch, group, rank, ranks)
        outcomes.put("fine")
    except BaseException:
        outcomes.put(traceback.format_exc())


def keystream(torch, group, ranks):
    stream, count = torch.cuda.Stream(), 1 << 18
    for guess, missed in (([4 * count, 4 * count], False), ([4 * count], False), ([2 * count], True), ([], False)):
        before = group.keystream_misses
        assert group.make_keystream(guess) == len(guess)
        group.wait_for_keystream()
        vector = torch.ones(count, device="cuda")
        torch.cuda.synchronize()
        group.all_reduce_at(vector.data_ptr(), vector.data_ptr(), count, "float32", "sum", stream.cuda_stream)
        stream.synchronize()
        group.outcome()
        assert torch.equal(vector, torch.full_like(vector, ranks))
        assert (group.keystream_misses != before) == missed, guess
    assert group.make_keystream([8] * 5) == 2, "no more than are kept"
    with pytest.raises(ValueError, match="negative"):
        group.make_keystream([-1])


def collectives(torch, group, rank, ranks):
    stream = torch.cuda.Stream()

    def done():
        stream.synchronize()
        group.outcome()

    for count in (1, 1001, 200_000):
        own = group.chunk(count)
        whole = torch.arange(count, dtype=torch.int32, device="cuda") * (rank + 1)
        total = torch.arange(count, dtype=torch.int32, device="cuda") * (ranks * (ranks + 1) // 2)
        part = torch.full((own.stop - own.start,), -1, dtype=torch.int32, device="cuda")
        gathered, given = torch.full_like(whole, -1), torch.full_like(whole, -1)
        torch.cuda.synchronize()
        group.reduce_scatter_at(
            whole.data_ptr(), part.data_ptr(), count, "int32", "sum", stream.cuda_stream
        )
        done()
        assert torch.equal(part, total[own])
        group.all_gather_at(part.data_ptr(), gathered.data_ptr(), count, "int32", stream.cuda_stream)
        done()
        assert torch.equal(gathered, total)
        source = whole.data_ptr() if rank == ranks - 1 else 0
        group.broadcast_at(source, given.data_ptr(), count, "int32", ranks - 1, stream.cuda_stream)
        done()
        assert torch.equal(given, torch.arange(count, dtype=torch.int32, device="cuda") * ranks)
        # In place: each rank's chunk where the vector has it.
        at = whole.data_ptr() + 4 * own.start
        group.reduce_scatter_at(whole.data_ptr(), at, count, "int32", "sum", stream.cuda_stream)
        group.all_gather_at(at, whole.data_ptr(), count, "int32", stream.cuda_stream)
        done()
        assert torch.equal(whole, total)
    with pytest.raises(ValueError, match="overlap"):
        group.all_reduce_at(whole.data_ptr(), whole.data_ptr() + 4, 1000, "int32", "sum", stream.cuda_stream)
    with pytest.raises(ValueError, match="root"):
        group.broadcast_at(whole.data_ptr(), whole.data_ptr(), 1000, "int32", ranks, stream.cuda_stream)
    group.close()


def test_every_collective_of_processes_on_one_gpu(torch):
    ranks, context = 2, multiprocessing.get_context("spawn")
    pipes, outcomes = [context.Pipe() for _ in range(ranks)], context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, there, outcomes))
        for rank, (_, there) in enumerate(pipes)
    ]
    for process, (_, there) in zip(processes, pipes):
        process.start()
        there.close()
    here = [mine for mine, _ in pipes]
    try:
        # What the ranks gather, until they are done and hang up.
        while True:
            try:
                messages = [end.recv() for end in here if end.poll(120)]
            except EOFError:
                break
            for end in here:
                end.send(messages)
        assert [outcomes.get(timeout=60) for _ in processes] == ["fine"] * ranks
    finally:
        for process in processes:
            process.join(5)
            process.terminate()
