"""The noise: known answers, equal words in NumPy, torch and C, disjoint streams, the tail."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.ops import gumbel
from headrace.sampling import noise
from headrace.sampling.noise import MASK32, NoiseAddress, Stream

EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
TAIL = np.array([0, 1, 2, 10, 10**3, 2**16, 2**31, 2**32 - 1], dtype=np.uint32)


KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((MASK32,) * 4, (MASK32,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter, key, want):
    def text(values):
        four = noise.philox4x32(values[:4], values[4:])
        return " ".join(f"{w if isinstance(w, int) else w.item():08x}" for w in four)

    values = (*counter, *key)
    assert text(values) == want
    assert text([np.array([v], dtype=np.uint64) for v in values]) == want
    assert text([torch.tensor([v]) for v in values]) == want


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(10)", "range(9)"),
        ("0xD2511F53", "0xD2511F55"),
        ("0x9E3779B9", "0x9E3779B1"),
        ("^ c1 ^ k0", "^ c1 ^ k1"),
        ("p1 & MASK32, p0 & MASK32", "p0 & MASK32, p1 & MASK32"),
        ("(p1 >> 32) & MASK32", "(p1 >> 32)"),
    ],
)
def test_mutants_of_philox_are_seen(old, new, monkeypatch):
    text = inspect.getsource(noise.philox4x32)
    assert text.count(old) == 1
    names = dict(vars(noise))
    exec(text.replace(old, new), names)
    monkeypatch.setattr(noise, "philox4x32", names["philox4x32"])
    with pytest.raises(AssertionError):
        for known in KNOWN:
            test_philox_known_answers(*known)


def random_fields(count: int) -> list[np.ndarray]:
    """Seed, stream, position, attempt, lane as uint64; about one in three is an extreme value."""
    rng = np.random.default_rng(1)
    fields = []
    for top in (2**64, 3, 2**32, 2**32, 2**32):
        values = rng.integers(0, top, count, dtype=np.uint64)
        extremes = np.array([e % top for e in EXTREMES], dtype=np.uint64)
        fields.append(np.where(rng.random(count) < 0.3, rng.choice(extremes, count), values))
    return fields


def test_torch_words_equal_numpy():
    fields = random_fields(100_000)
    tensors = [torch.from_numpy(f.view(np.int64)) for f in fields]
    want = noise.words(NoiseAddress(*fields))
    got = gumbel.words(NoiseAddress(*tensors)).numpy()
    np.testing.assert_array_equal(got, want.astype(np.int64))
    assert len(np.unique(want)) > 50_000


def test_mutants_of_torchs_words_are_seen(monkeypatch):
    monkeypatch.setattr(gumbel, "MASK32", 2**31 - 1)
    with pytest.raises(AssertionError):
        test_torch_words_equal_numpy()


def test_c_words_equal_numpy():
    lib = gumbel.compiled(gumbel.SOURCE)
    for seed, stream, position, attempt, _ in zip(*random_fields(200), strict=True):
        got = np.empty(1024, np.uint32)
        lib.hr_words(seed, stream, position, attempt, len(got), got.ctypes.data)
        address = NoiseAddress(seed, stream, position, attempt, np.arange(len(got)))
        np.testing.assert_array_equal(got, noise.words(address))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k1 = (uint32_t)(seed >> 32)", "k1 = 0"),
        ("c0 = lane / 4 + i", "c0 = lane + i"),
        ("c2 = attempt", "c2 = 0"),
        ("c3 = stream", "c3 = 0"),
    ],
)
def test_mutants_of_cs_words_are_seen(old, new, monkeypatch, tmp_path):
    text = gumbel.SOURCE.read_text()
    assert text.count(old) == 1
    source = tmp_path / "gumbel.c"
    source.write_text(text.replace(old, new))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gumbel, "SOURCE", source)
    with pytest.raises(AssertionError):
        test_c_words_equal_numpy()


def test_addresses_broadcast_and_take_ints():
    seed, position = np.array([[3], [-5]]), np.array([[7], [8]])
    whole = noise.words(NoiseAddress(seed, Stream.DRAFT, position, 6, np.arange(9)))
    assert whole.shape == (2, 9)
    assert whole[1, 6] == noise.words(NoiseAddress(2**64 - 5, 2, 8, 6, 6))[0]
    tensors = NoiseAddress(torch.from_numpy(seed), 2, torch.from_numpy(position), 6, 6)
    np.testing.assert_array_equal(gumbel.words(tensors).numpy(), whole[:, 6:7])


@pytest.mark.parametrize("seed", [1.5, [-1, 2**64 - 1], "1"])
def test_an_address_of_other_than_integers_is_refused(seed):
    with pytest.raises(TypeError, match="64-bit integers"):
        noise.words(NoiseAddress(seed, 0, 0, 0, 0))


def stream_faults() -> list[str]:
    """What is wrong with the streams over 10^6 addresses: shared blocks or correlated words."""
    position, block = np.divmod(np.arange(333_334, dtype=np.uint64), 100)
    faults, blocks, uniforms = [], [], []
    for stream in Stream:
        key = (np.uint64(1234) + 0 * block, np.uint64(99) + 0 * block)
        four = noise.philox4x32((block, position, 0 * block, int(stream) + 0 * block), key)
        blocks.append(np.stack(four, axis=1).astype(np.uint32))
        uniforms.append(noise.uniform(blocks[-1]).ravel())
    whole = np.concatenate(blocks).view("V16").ravel()
    if len(np.unique(whole)) < len(whole):
        faults.append("two addresses give one block")
    if max(abs(np.corrcoef(uniforms)[np.triu_indices(3, 1)])) > 0.005:
        faults.append("streams are correlated")
    return faults


def test_streams_are_disjoint():
    assert stream_faults() == []


def without_stream(counter, key):
    return philox((*counter[:3], 0 * counter[3]), key)


def with_salted_position(counter, key):
    block, position, attempt, stream = counter
    return philox((block, position + 1000 * stream, attempt, 0 * stream), key)


philox = noise.philox4x32


@pytest.mark.parametrize("mutant", [without_stream, with_salted_position])
def test_mutant_streams_that_overlap_are_seen(monkeypatch, mutant):
    monkeypatch.setattr(noise, "philox4x32", mutant)
    assert "two addresses give one block" in stream_faults()


def with_echoes(counter, key):
    """One block in twenty of the other streams nearly repeats stream 0's."""
    block, position, attempt, stream = counter
    echo = (stream > 0) & (block % 20 == 0)
    first = philox((block, position, attempt, 0 * stream), key)
    own = philox(counter, key)
    return tuple(np.where(echo, a ^ stream, b) for a, b in zip(first, own, strict=True))


def test_mutant_streams_that_are_correlated_are_seen(monkeypatch):
    monkeypatch.setattr(noise, "philox4x32", with_echoes)
    assert stream_faults() == ["streams are correlated"]


def repeated_counters(module, words_of: Callable[[NoiseAddress], object], lanes: int) -> int:
    """Of 3,000 * lanes different addresses, how many share counter and word with another."""
    near = np.arange(25)
    position = np.concatenate([near, near + 2**30])[:, None, None]
    attempt, lane = np.arange(20)[:, None], np.arange(lanes)
    counters = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module,
            "philox4x32",
            lambda counter, key: counters.append(counter) or philox(counter, key),
        )
        for stream in Stream:
            words_of(NoiseAddress(77, int(stream), position, attempt, lane))
    shape = (50, 20, lanes)
    picked = np.broadcast_to(lane & 3, shape).ravel()
    columns = [
        [np.broadcast_to(np.asarray(c, np.uint64), shape).ravel() for c in counter]
        for counter in counters
    ]
    table = np.concatenate([np.stack([*column, picked], axis=1) for column in columns])
    table = table.astype(np.uint32)
    return len(table) - len(np.unique(table.view("V20")))


def torch_words(address: NoiseAddress) -> object:
    position, attempt, lane = map(
        torch.from_numpy, (address.position, address.attempt, address.lane)
    )
    seed = torch.tensor([address.seed])
    return gumbel.words(NoiseAddress(seed, address.stream, position, attempt, lane))


@pytest.mark.parametrize(
    ("module", "words_of"), [(noise, noise.words), (gumbel, torch_words)], ids=["numpy", "torch"]
)
def test_a_million_addresses_have_their_own_counters(module, words_of):
    assert repeated_counters(module, words_of, 334) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda a: replace(a, stream=0, position=a.position + (a.stream << 30)),
        lambda a: replace(a, attempt=0),
        lambda a: replace(a, lane=a.lane % 8),
        lambda a: replace(a, attempt=a.attempt + a.stream, stream=0),
    ],
    ids=["salted", "no attempt", "few lanes", "streams in attempts"],
)
def test_mutant_addresses_that_share_counters_are_seen(change):
    assert repeated_counters(noise, lambda address: noise.words(change(address)), 20) > 0


def uniformity(words_of: Callable[[NoiseAddress], np.ndarray]) -> float:
    """Chi-square of 10^6 numbers in 256 bins over its threshold."""
    address = NoiseAddress(7, Stream.ACCEPT, np.arange(1000)[:, None], 5, np.arange(1000))
    u = noise.uniform(words_of(address)).ravel()
    bins = np.bincount((u * 256).astype(np.int64), minlength=256)
    expected = len(u) / 256
    assert len(bins) == 256
    chi = float(((bins - expected) ** 2 / expected).sum())
    return chi / (255 + 10 * np.sqrt(2 * 255))


def test_uniform_is_uniform():
    assert uniformity(noise.words) < 1


def test_mutants_that_are_not_uniform_are_seen(monkeypatch):
    assert uniformity(lambda address: noise.words(address) | np.uint32(2**24)) > 1
    uniform = noise.uniform
    monkeypatch.setattr(noise, "uniform", lambda words: uniform(words) ** np.float32(1.02))
    assert uniformity(noise.words) > 1


def numpy_noise(words: np.ndarray) -> np.ndarray:
    return noise.gumbel(noise.uniform(words))


def torch_noise(words: np.ndarray) -> np.ndarray:
    tensor = torch.from_numpy(words.astype(np.int64))
    return gumbel.gumbel(gumbel.uniform(tensor)).numpy()


def c_noise(words: np.ndarray) -> np.ndarray:
    out = np.empty(len(words), np.float32)
    gumbel.compiled(gumbel.SOURCE).hr_gumbel(len(words), words.ctypes.data, out.ctypes.data)
    return out


def exact_noise(words: np.ndarray) -> np.ndarray:
    u = np.minimum((words.astype(np.float64) + 0.5) * 2.0**-32, noise.BELOW_ONE)
    return -np.log(-np.log1p(-u))


def tail_error(noise_of: Callable[[np.ndarray], np.ndarray]) -> float:
    """Largest relative error of fp32 Gumbel noise against the formula in fp64."""
    got, want = noise_of(TAIL), exact_noise(TAIL)
    assert got.dtype == np.float32
    return float((abs(got - want) / abs(want)).max())


IMPLEMENTATIONS = [numpy_noise, torch_noise, c_noise]


@pytest.mark.parametrize("noise_of", IMPLEMENTATIONS)
def test_the_tail_is_resolved(noise_of):
    assert tail_error(noise_of) < 1e-5
    assert noise_of(TAIL)[0] == pytest.approx(22.87, abs=0.005)


@pytest.mark.parametrize("noise_of", IMPLEMENTATIONS)
def test_noise_is_accurate_everywhere(noise_of):
    rng = np.random.default_rng(2)
    small = (2.0 ** rng.uniform(0, 32, 100_000)).astype(np.uint32)
    words = np.concatenate([rng.integers(0, 2**32, 100_000, dtype=np.uint32), small, ~small])
    got = noise_of(words)
    assert np.isfinite(got).all()
    u = noise.uniform(words).astype(np.float64)
    assert abs(got - -np.log(-np.log1p(-u))).max() < 2e-6


@pytest.mark.parametrize("module", [noise, gumbel])
def test_uniform_is_never_0_or_1(module):
    u = torch.as_tensor(module.uniform(TAIL if module is noise else torch.from_numpy(TAIL).long()))
    assert u.dtype == torch.float32
    assert 0 < u.min() < 2**-32
    assert u.max() == 1 - 2**-24


def test_mutant_of_23_bits_cuts_the_tail(monkeypatch):
    def coarse(words):
        wide = words.astype(np.float32) if isinstance(words, np.ndarray) else words.float()
        return ((wide * 2**-9 // 1 + 0.5) * 2**-23).clip(max=noise.BELOW_ONE)

    for module, noise_of in ((noise, numpy_noise), (gumbel, torch_noise)):
        monkeypatch.setattr(module, "uniform", coarse)
        assert noise_of(TAIL)[0] < 17
        assert tail_error(noise_of) > 0.1


def test_seeds_are_64_bit_and_distinct():
    requests = {noise.derive_seed(engine, i) for engine in (0, 1, -1) for i in range(1000)}
    children = {noise.child_seed(seed, i) for seed in (0, 1, 2**64 - 1) for i in range(1000)}
    assert len(requests) == len(children) == 3000
    assert not requests & children
    assert all(0 <= s < 2**64 for s in requests | children)
    assert max(requests) > 2**63
    assert noise.child_seed(-1, 4) == noise.child_seed(2**64 - 1, 4)


def test_derived_seeds_stay_what_they_are():
    """A release that changed them would change what users' recorded runs give."""
    assert noise.derive_seed(0, 0) == 14399271413295302885
    assert noise.child_seed(0, 0) == 3682024846928261480


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_as_int64_keeps_the_seed_mod_2_to_64(seed):
    signed = noise.as_int64(seed)
    assert -(2**63) <= signed < 2**63
    assert (signed - seed) % 2**64 == 0


def test_noise_imports_no_torch():
    code = "import sys, headrace.sampling.noise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
