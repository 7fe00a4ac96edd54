"""The sampler, in C and in torch: its law, its independence of the batch, and its odd rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.ops import gumbel
from headrace.sampling import noise, sampler
from headrace.sampling.noise import NoiseAddress, Stream
from headrace.sampling.sampler import Sampler

NAN, INF = float("nan"), float("inf")
Mutate = Callable[[str, str], None]


@pytest.fixture(params=["c", "torch"])
def op(request, monkeypatch) -> str:
    """Runs a test on both implementations."""
    if request.param == "torch":
        monkeypatch.setattr(gumbel, "_library", lambda logits: None)
    else:
        assert gumbel.compiled(gumbel.SOURCE) is not None, "these tests need a C compiler"
    return request.param


@pytest.fixture
def mutate_c(monkeypatch, tmp_path) -> Mutate:
    """Builds the C with one text replaced, away from the user's cache, and samples with it."""

    def mutate(old: str, new: str) -> None:
        text = gumbel.SOURCE.read_text()
        assert text.count(old) == 1
        source = tmp_path / "gumbel.c"
        source.write_text(text.replace(old, new))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(gumbel, "SOURCE", source)

    return mutate


def sample(
    logits: Tensor, temperature=1.0, seed: Tensor | int = 0, position: Tensor | int = 0, **kw: bool
) -> Tensor:
    """The real sampler, with scalars spread over the rows."""
    rows = len(logits)
    temperature_S = torch.as_tensor(temperature, dtype=torch.float32).expand(rows)
    seed_S, position_S = (torch.as_tensor(x).expand(rows) for x in (seed, position))
    kw.setdefault("any_random", True)
    return Sampler().sample(logits, temperature_S, seed_S, position_S, **kw)


def batch(rows: int, vocab: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of all kinds: one in four greedy, seeds of either sign, positions up to 2^32 - 1."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32)).to(dtype)
    temperature = torch.from_numpy(rng.choice([0, 0.6, 1, 1.5], rows).astype(np.float32))
    seed = torch.from_numpy(rng.integers(-(2**63), 2**63, rows))
    position = torch.from_numpy(rng.choice([0, 17, 2**31, 2**32 - 1], rows))
    return logits, temperature, seed, position


# --- the law -------------------------------------------------------------------------------------


def excess(temperature: float, seed: Tensor | int, position: Tensor | int) -> float:
    """Chi-square of 50,000 draws against the softmax, over its threshold: above 1 is a fault."""
    count = 50_000
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 1.5, 32).astype(np.float32))
    ids = sample(logits.expand(count, -1).contiguous(), temperature, seed, position)
    got = np.bincount(ids.numpy(), minlength=32)
    want = (logits.double() / temperature).softmax(0).numpy() * count
    rare = want < 5
    got, want = (np.append(x[~rare], x[rare].sum()) for x in (got, want))
    if want[-1] == 0:
        got, want = got[:-1], want[:-1]
    df = len(want) - 1
    return float(((got - want) ** 2 / want).sum() / (df + 10 * np.sqrt(2 * df)))


MANY = torch.arange(50_000)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_draws_follow_the_softmax(op, temperature):
    assert excess(temperature, seed=11, position=MANY) < 1
    assert excess(temperature, seed=MANY - 25_000, position=11) < 1


def test_mutant_that_ignores_the_position_is_seen(op, monkeypatch, mutate_c):
    if op == "c":
        mutate_c("tile_words(seed, 0, position, 0", "tile_words(seed, 0, 0 * position, 0")
    else:
        lanes = gumbel._lanes
        monkeypatch.setattr(
            gumbel, "_lanes", lambda seed, position, *rest: lanes(seed, 0 * position, *rest)
        )
    assert excess(1.0, seed=11, position=MANY) > 1


def test_mutant_that_ignores_the_seed_is_seen(op, monkeypatch, mutate_c):
    if op == "c":
        mutate_c("tile_words(seed, 0, position, 0", "tile_words(0 * seed, 0, position, 0")
    else:
        lanes = gumbel._lanes
        monkeypatch.setattr(
            gumbel, "_lanes", lambda seed, position, *rest: lanes(0 * seed, position, *rest)
        )
    assert excess(1.0, seed=MANY, position=11) > 1


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_mutant_that_divides_by_the_temperature_twice_is_seen(
    op, monkeypatch, mutate_c, temperature
):
    if op == "c":
        mutate_c("x[j] / temperature", "x[j] / temperature / temperature")
    else:
        draw = gumbel.draw_reference
        monkeypatch.setattr(
            gumbel, "draw_reference", lambda x, t, *rest: draw(x / t[:, None], t, *rest)
        )
    assert excess(temperature, seed=11, position=MANY) > 1


def rare_draws() -> int:
    """How many of 10^6 draws take the token that lies 8 nats below the other."""
    count = 10**6
    logits = torch.tensor([[0.0, -8.0]]).expand(count, -1)
    return int(sample(logits, seed=21, position=torch.arange(count)).sum())


EXPECTED, FIVE_SIGMA = 335, 92


def test_the_tail_of_the_noise_draws_rare_tokens(op):
    assert abs(rare_draws() - EXPECTED) < FIVE_SIGMA


def test_mutant_noise_of_8_bits_is_seen(op, monkeypatch, mutate_c):
    """Its largest value is 6.2."""
    if op == "c":
        halves = "(float)(int32_t)(word >> 16) * 65536.0f + (float)(int32_t)(word & 0xffff)"
        mutate_c(halves, "(float)(int32_t)(word >> 24) * 16777216.0f + 8388608.0f")
    else:
        monkeypatch.setattr(gumbel, "uniform", lambda words: ((words >> 24).float() + 0.5) / 256)
    assert abs(rare_draws() - EXPECTED) > FIVE_SIGMA


# --- one result, whoever computes it -------------------------------------------------------------


def numpy_scores(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> np.ndarray:
    """The definition: fp32 scores `[S, V]` by `headrace.sampling.noise` alone."""
    x, t = logits.float().numpy(), temperature.numpy()[:, None]
    lane = np.arange(x.shape[1])
    address = NoiseAddress(seed.numpy()[:, None], Stream.TARGET, position.numpy()[:, None], 0, lane)
    drawn = x / np.where(t > 0, t, 1) + noise.gumbel(noise.uniform(noise.words(address)))
    return np.where(t > 0, drawn, x)


def differing(got: Tensor, scores: np.ndarray) -> tuple[int, int]:
    """Rows whose id is not the best score's: how many within 4 ulp of it, how many beyond."""
    best = scores.max(axis=1)
    gap = best - np.take_along_axis(scores, got.numpy()[:, None], 1)[:, 0]
    near = gap <= 4 * np.spacing(np.maximum(abs(best), 1))
    other = got.numpy() != scores.argmax(axis=1)
    return int((other & near).sum()), int((other & ~near).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_are_those_of_the_definition(op, dtype):
    ties = rows = 0
    for vocab, count in ((1, 8), (3, 64), (255, 64), (256, 64), (257, 64), (5000, 64), (49152, 8)):
        args = batch(count, vocab, dtype)
        near, beyond = differing(sample(*args), numpy_scores(*args))
        assert beyond == 0
        ties, rows = ties + near, rows + count
    print(f"{op} {dtype}: {ties} of {rows} rows differ by a tie within 4 ulp")
    assert ties <= rows // 100


def test_a_row_does_not_know_its_batch(op):
    args = batch(24, 5000)
    whole = sample(*args)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert sample(*(a[order] for a in args)).equal(whole[order])
    assert torch.cat([sample(*(a[i : i + 1] for a in args)) for i in range(24)]).equal(whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert sample(*args).equal(whole)
    finally:
        torch.set_num_threads(threads)


def test_logits_may_be_a_view(op):
    args = batch(6, 1000)
    wide = torch.full((12, 1500), INF)
    wide[::2, 100:1100] = args[0]
    view = wide[::2, 100:1100]
    assert sample(view, *args[1:]).equal(sample(*args))
    transposed = args[0].T.contiguous().T
    assert sample(transposed, *args[1:]).equal(sample(*args))
    assert sample(args[0][:0], *(a[:0] for a in args[1:])).shape == (0,)


@pytest.mark.parametrize("tile", [4, 100, 1000, 8192])
def test_the_tile_changes_nothing(tile):
    args = batch(16, 5000)
    assert gumbel.draw_reference(*args, tile=tile).equal(gumbel.draw_reference(*args))


def test_seeds_count_mod_2_to_64(op):
    logits = torch.zeros(1, 1000)
    ids = {
        s: sample(logits, seed=noise.as_int64(s)).item() for s in (-1, 2**64 - 1, 0, 2**63, 2**32)
    }
    assert ids[-1] == ids[2**64 - 1]
    assert len(set(ids.values())) == 4


def test_nothing_is_copied_to_fp32_whole_and_nothing_waits(op):
    class Watch(TorchDispatchMode):
        largest, waits = 0, False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor) and tensor.data_ptr() != logits.data_ptr():
                    self.largest = max(self.largest, tensor.numel())
            self.waits |= any(s in str(func) for s in ("local_scalar", "nonzero", "is_nonzero"))
            return out

    logits, *rest = batch(4, 5 * gumbel.TILE, torch.bfloat16)
    with Watch() as watch:
        sample(logits, *rest)
        sample(logits, *rest, any_random=False)
        assert not watch.waits
        assert watch.largest < logits.numel()
        logits.float().max().item()  # what the watch is there to see
        assert watch.waits
        assert watch.largest == logits.numel()


# --- greedy, ties, and rows that cannot be sampled -----------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("any_random", [True, False])
def test_temperature_0_takes_the_largest(op, dtype, any_random):
    for vocab in (1, 255, 257, 5000):
        logits = batch(16, vocab, dtype)[0]
        want = logits.float().numpy().argmax(axis=1)
        for temperature in (0.0, gumbel.MIN_TEMPERATURE / 2):
            got = sample(logits, temperature, any_random=any_random)
            np.testing.assert_array_equal(got.numpy(), want)


def test_the_coldest_draw_is_the_largest_and_below_it_nothing_overflows(op):
    logits = torch.tensor([[-1e30, -3.0, 2.0, 1e3], [-2.0, -30.0, -9.0, -3.0]])
    for temperature in (gumbel.MIN_TEMPERATURE, 1e-20, 1e-45):
        assert sample(logits, temperature).tolist() == [3, 0]


@pytest.mark.parametrize("any_random", [True, False])
def test_ties_go_to_the_lowest_id(op, any_random):
    for value in (0.0, -7.5, INF):
        logits = torch.full((1, 1000), -100.0)
        logits[0, [300, 301, 999]] = value
        assert sample(logits, 0.0, any_random=any_random).item() == 300
    zeros = torch.full((1, 600), -1.0)
    zeros[0, 5], zeros[0, 9], zeros[0, 300] = -0.0, 0.0, 0.0
    assert sample(zeros, 0.0, any_random=any_random).item() == 5


def test_infinities_at_a_temperature(op):
    logits = torch.full((3, 1000), -INF)
    logits[0, 700] = -3.0
    logits[1], logits[1, 600], logits[1, 800] = 0.0, INF, INF
    logits[2, [1, 2]] = 4.0
    got = sample(logits, 0.7).tolist()
    assert got[:2] == [700, 600]
    assert got[2] in (1, 2)


def odd_rows_faults(dtype: torch.dtype = torch.float32) -> list[str]:
    """Where rows with a NaN, or of -inf alone, do not give -1, or change the sound rows."""
    clean = batch(8, 1000, dtype)[0]
    nan = -torch.tensor(NAN, dtype=dtype)  # with its sign bit set
    faults = []
    for temperature, any_random in ((0.0, False), (0.0, True), (1.0, True)):
        for at in (0, 300, 999):
            logits = clean.clone()
            logits[1, at], logits[2, at], logits[3], logits[4] = NAN, nan, NAN, -INF
            logits[5], logits[5, at] = -INF, NAN
            logits[6, 0], logits[6, 999] = INF, NAN
            ids = sample(logits, temperature, any_random=any_random)
            sound = sample(clean, temperature, any_random=any_random)
            if ids[[0, 7]].tolist() != sound[[0, 7]].tolist() or sound.min() < 0:
                faults.append(f"a sound row changed, T={temperature}, at {at}")
            if ids[1:7].tolist() != [-1] * 6:
                faults.append(f"ids {ids[1:7].tolist()}, T={temperature}, at {at}")
    return faults


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_cannot_be_sampled_gives_minus_1(op, dtype):
    assert odd_rows_faults(dtype) == []


def test_mutant_that_returns_v_for_a_nan_is_seen(op, monkeypatch, mutate_c):
    if op == "c":
        mutate_c("return nan ? -1 : id", "return nan ? vocab : id")
    else:
        monkeypatch.setattr(
            gumbel, "_checked", lambda best, ids: torch.where(best > -torch.inf, ids, 1000)
        )
    assert any("1000" in fault for fault in odd_rows_faults())


def test_mutant_that_lets_a_nan_lose_is_seen(op, monkeypatch, mutate_c):
    if op == "c":
        mutate_c("nan |= x[j] != x[j];", "")
    else:
        monkeypatch.setattr(gumbel, "_checked", lambda best, ids: ids)
    assert odd_rows_faults()


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(8)}, "logits must be floating"),
        ({0: torch.zeros(2, 8, dtype=torch.int64)}, "logits must be floating"),
        ({0: torch.zeros(2, 0)}, "V > 0"),
        ({1: torch.ones(2, dtype=torch.float64)}, "temperature must be torch.float32"),
        ({1: torch.ones(3)}, r"temperature must be torch.float32 \[2\]"),
        ({2: torch.zeros(2, dtype=torch.int32)}, "seed must be torch.int64"),
        ({3: torch.zeros(2, 1, dtype=torch.int64)}, "position must be torch.int64"),
        ({3: torch.zeros(2, dtype=torch.int64, device="meta")}, "position must be .* on cpu"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    args = [torch.zeros(2, 8), torch.ones(2), torch.zeros(2).long(), torch.zeros(2).long()]
    for index, value in change.items():
        args[index] = value
    with pytest.raises(ValueError, match=message):
        Sampler().sample(*args, any_random=True)


def test_mutant_without_the_check_reads_a_wrong_type(monkeypatch):
    """Temperatures of 0.5 in fp64, read as fp32, have a zero where the first row's should be."""
    monkeypatch.setattr(sampler, "_check", lambda *args: None)
    logits, _, seed, position = batch(8, 5000)
    half = torch.full((8,), 0.5, dtype=torch.float64)
    got = Sampler().sample(logits, half, seed, position, any_random=True)
    assert not got.equal(Sampler().sample(logits, half.float(), seed, position, any_random=True))


def test_without_a_compiler_torch_gives_the_same_ids(monkeypatch):
    args = batch(16, 3000)
    with_c = sample(*args)
    monkeypatch.setattr(gumbel.cbuild, "load", lambda source: None)
    gumbel.compiled.cache_clear()
    assert gumbel.compiled(gumbel.SOURCE) is None
    without = sample(*args)
    gumbel.compiled.cache_clear()
    assert without.equal(with_c)
