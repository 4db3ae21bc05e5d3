"""Optimizers equal their published updates, written out step by step."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import UserError
from gossamer.optim import (
    AccumAdam,
    AccumAdamW,
    DiLoCo,
    SmoothAdam,
    SmoothAdamW,
    auto_smoothing,
    auto_window,
    blocks,
    tell_num_workers,
)
from gossamer.optim.blocks import Tensors
from gossamer.optim.smooth_adam import SmoothUpdate, update_
from gossamer.optim.smooth_adam import update_by_lists_ as update_by_lists_smoothly_
from gossamer.optim.window_update import Blocks, WindowUpdate, update_by_lists_


def parameters(num: int = 3) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), (2, 2, 2)][:num]
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


def gradient(parameter: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return parameter.detach() + noise


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter in params:
            parameter.grad = gradient(parameter, step)
        optimizer.step()


# Optimizers for workers' own gradients, with a setting that makes them differ from Adam.
LOCAL: dict[str, Any] = {
    "accum": partial(AccumAdamW, window=4),
    "smooth": partial(SmoothAdamW, smoothing=0.6),
}
both = pytest.mark.parametrize("make", LOCAL.values(), ids=LOCAL)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (partial(AccumAdam, window=1), torch.optim.Adam),
        (partial(AccumAdamW, window=1), torch.optim.AdamW),
        (partial(SmoothAdam, smoothing=0.0), torch.optim.Adam),
        (partial(SmoothAdamW, smoothing=0.0), torch.optim.AdamW),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_for_one_worker_it_is_adam(ours: Any, theirs: Any, weight_decay: float) -> None:
    """A window of 1, and no smoothing, are torch's Adam and AdamW to rounding over fifty steps."""
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    mine, reference = parameters(), parameters()
    run(ours(mine, **settings), mine, range(50))
    run(theirs(reference, **settings), reference, range(50))
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_defaults_are_those_of_torch() -> None:
    """Someone who swaps the class name gets the same settings."""
    adam, adamw = torch.optim.Adam, torch.optim.AdamW
    pairs = ((AccumAdam, adam), (AccumAdamW, adamw), (SmoothAdam, adam), (SmoothAdamW, adamw))
    for ours, theirs in pairs:
        mine, reference = ours(parameters()).defaults, theirs(parameters()).defaults
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert mine[name] == reference[name]


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("window", [2, 4, 7])
@pytest.mark.parametrize("betas_per", ["step", "window"])
def test_the_update_is_the_papers(window: int, decoupled: bool, betas_per: Any) -> None:
    """The published recursion for one vector; betas per step are powers of s in it."""
    lr, beta1, beta2, eps, decay = 0.02, 0.9, 0.99, 1e-8, 0.05
    (param,) = parameters(1)
    x = param.detach().clone()
    m = v = b = torch.zeros_like(x)
    kind = AccumAdamW if decoupled else AccumAdam
    settings: dict[str, Any] = {"window": window, "betas_per": betas_per}
    optimizer = kind([param], lr, (beta1, beta2), eps, decay, **settings)
    if betas_per == "step":
        beta1, beta2 = beta1**window, beta2**window
    for t in range(1, 31):
        g = gradient(x, t)
        param.grad = gradient(param, t)
        optimizer.step()

        k = math.ceil(t / window)
        if decoupled:
            x = x * (1 - lr * decay)
        else:
            g = g + decay * x
        m_now = beta1 * m + (1 - beta1) * g
        v_now = beta2 * v + (1 - beta2) * g**2
        x = x - lr / (1 - beta1**k) * m_now / (v_now.sqrt() / math.sqrt(1 - beta2**k) + eps)
        b = b + g / window
        if t % window == 0:
            m = beta1 * m + (1 - beta1) * b
            v = beta2 * v + (1 - beta2) * b**2
            b = torch.zeros_like(b)
        torch.testing.assert_close(param.detach(), x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("smoothing", [0.3, 0.9])
def test_the_second_moment_is_of_smoothed_gradients(smoothing: float, decoupled: bool) -> None:
    """The recursion of SmoothAdam for one vector; the first moment is Adam's."""
    lr, beta1, beta2, eps, decay = 0.02, 0.9, 0.99, 1e-8, 0.05
    (param,) = parameters(1)
    x = param.detach().clone()
    m = s = v = torch.zeros_like(x)
    kind = SmoothAdamW if decoupled else SmoothAdam
    optimizer = kind([param], lr, (beta1, beta2), eps, decay, smoothing=smoothing)
    for t in range(1, 31):
        g = gradient(x, t)
        param.grad = gradient(param, t)
        optimizer.step()

        if decoupled:
            x = x * (1 - lr * decay)
        else:
            g = g + decay * x
        m = beta1 * m + (1 - beta1) * g
        s = smoothing * s + (1 - smoothing) * g
        v = beta2 * v + (1 - beta2) * (s / (1 - smoothing**t)) ** 2
        v = torch.maximum(v, (1 - beta2) * g**2)
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        x = x - lr * m_hat / (v_hat.sqrt() + eps)
        torch.testing.assert_close(param.detach(), x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("num_workers", [1, 4, 16])
def test_smoothing_divides_noise_by_the_number_of_workers(num_workers: int) -> None:
    """The second moment of independent gradients is an nth of their square, as of their mean."""
    param = nn.Parameter(torch.zeros(100, dtype=torch.float64))
    optimizer = SmoothAdam([param], lr=0.0)
    tell_num_workers(optimizer, num_workers)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4000):
        param.grad = torch.randn(100, generator=generator, dtype=torch.float64)
        optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].mean() == pytest.approx(1 / num_workers, rel=0.1)


@both
@pytest.mark.parametrize("stop", [4, 5, 7])
def test_a_checkpoint_continues_exactly(make: Any, stop: int) -> None:
    """In the middle of a window, too: the run continues bit for bit."""
    whole = parameters()
    run(make(whole), whole, range(12))

    first = parameters()
    optimizer = make(first)
    run(optimizer, first, range(stop))
    saved = copy.deepcopy(optimizer.state_dict())
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = make(second)
    resumed.load_state_dict(saved)
    run(resumed, second, range(stop, 12))
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


@both
def test_a_parameter_that_misses_a_gradient_counts_its_own_steps(make: Any) -> None:
    """Its window and bias correction follow its own gradients, as if it were alone."""
    together, alone = parameters(2), parameters(2)
    optimizer, reference = make(together), make(alone[1:])
    for step in range(9):
        together[0].grad = gradient(together[0], step)
        together[1].grad = gradient(together[1], step) if step % 2 else None
        optimizer.step()
        if step % 2:
            alone[1].grad = gradient(alone[1], step)
            reference.step()
    assert torch.equal(together[1], alone[1])


def test_groups_have_settings_of_their_own() -> None:
    """Learning rate and window per parameter group."""
    params = parameters(2)
    groups = [{"params": params[:1], "window": 1}, {"params": params[1:], "lr": 0.0}]
    optimizer = AccumAdam(groups, lr=0.1, window=4)
    before = params[1].detach().clone()
    run(optimizer, params, range(3))
    assert torch.equal(params[1], before)
    assert [group["window"] for group in optimizer.param_groups] == [1, 4]


@both
def test_stacked_workers_are_updated_as_single_ones(make: Any) -> None:
    """Elementwise: one [W, N] tensor is updated as W tensors of [N] are."""
    generator = torch.Generator().manual_seed(3)
    stacked = nn.Parameter(torch.randn(5, 6, generator=generator, dtype=torch.float64))
    single = [nn.Parameter(row.clone()) for row in stacked.detach()]
    optimizers = [make([stacked]), make(single)]
    for step in range(5):
        grad = gradient(stacked, step)
        stacked.grad = grad
        for parameter, row in zip(single, grad, strict=True):
            parameter.grad = row.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stacked.detach(), torch.stack([p.detach() for p in single]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1}, "lr must be a number >= 0, .* got -1"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), .* got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"window": 0}, 'window must be an integer >= 1, or "auto", got 0'),
        ({"window": "half"}, "window must be an integer .* got half"),
        ({"betas_per": "epoch"}, 'betas_per must be "step" or "window", got epoch'),
        ({"window": 2.5}, "window must be an integer .* got 2.5"),
        ({"betas": (0.9, 0.9, 0.9)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers .* got 0.9"),
        ({"betas": ("0.9", 0.99)}, "betas must be two numbers"),
        ({"lr": "fast"}, "lr must be a number >= 0, .* got fast"),
        ({"smoothing": 1.0}, r'smoothing must be a number in \[0, 1\), .* or "auto", got 1.0'),
        ({"smoothing": True}, "smoothing must be a number .* got True"),
        ({"smoothing": "half"}, "smoothing must be a number .* got half"),
        ({"smoothing": 0.5, "lr": -1}, "lr must be a number >= 0, .* got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    """They raise at construction, with the required and the given value."""
    kind = SmoothAdam if "smoothing" in settings else AccumAdam
    with pytest.raises(UserError, match=words):
        kind(parameters(), **settings)


def twins(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


@pytest.mark.parametrize("num_steps", [5, 8])
def test_a_run_of_adamw_can_be_continued(num_steps: int) -> None:
    """Adam's state loads; it continues as Adam, or with the optimizer's own window.

    Betas per step keep both on one clock: a window opens at the next step, however many came
    before, and its bias correction is Adam's at the end of a window.
    """
    params = parameters()
    adamw = torch.optim.AdamW(params, lr=0.01)
    run(adamw, params, range(num_steps))
    for window in (1, 4):
        mine, reference = twins(params), twins(params)
        ours = AccumAdamW(mine, window=window)
        ours.load_state_dict(copy.deepcopy(adamw.state_dict()))
        theirs = torch.optim.AdamW(reference)
        theirs.load_state_dict(copy.deepcopy(adamw.state_dict()))
        for step in range(num_steps, num_steps + 4):
            run(ours, mine, range(step, step + 1))
            run(theirs, reference, range(step, step + 1))
        equal = all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(mine, reference, strict=True))
        assert equal == (window == 1)
        assert all(p.allclose(q, rtol=0.1) for p, q in zip(mine, reference, strict=True))
        expected = num_steps + 4 if window == 1 else math.ceil(num_steps / 4) * 4 + 4
        assert all(ours.state[p]["step"] == expected for p in mine)
        if window == 4:  # the window has been committed
            assert all(not ours.state[p]["window_mean"].any() for p in mine)


def test_smoothing_starts_at_the_first_moment_of_a_run_of_adamw() -> None:
    """Which is an average of the same gradients; bias corrections then count steps as AdamW did."""
    params = parameters(1)
    adamw = torch.optim.AdamW(params, lr=0.01)
    run(adamw, params, range(5))
    exp_avg = adamw.state[params[0]]["exp_avg"].clone()
    g = gradient(params[0], 5)
    ours = SmoothAdamW.like(adamw, smoothing=0.6)
    run(ours, params, range(5, 6))
    unbiased = exp_avg / (1 - 0.9**5)
    expected = 0.6 * unbiased * (1 - 0.6**5) + 0.4 * g
    torch.testing.assert_close(ours.state[params[0]]["smoothed_grad"], expected)
    assert ours.state[params[0]]["step"] == 6


def test_states_of_before_have_betas_per_window() -> None:
    """An old state, without ``betas_per``, continues per window."""
    whole = parameters()
    run(AccumAdamW(whole, window=4, betas_per="window"), whole, range(12))

    params = parameters()
    optimizer = AccumAdamW(params, window=4, betas_per="window")
    run(optimizer, params, range(6))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["betas_per"]
    resumed_params = twins(params)
    resumed = AccumAdamW(resumed_params, window=4)
    resumed.load_state_dict(saved)
    run(resumed, resumed_params, range(6, 12))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed_params, strict=True))


# - The window that follows the number of workers


def test_auto_is_half_the_workers_and_bounded() -> None:
    """From plain Adam, for one worker, to the paper's longest window."""
    assert [auto_window(n) for n in (1, 2, 3, 4, 8, 9, 16, 32, 1008)] == [1, 1, 1, 2, 4, 4, 8, 8, 8]


def test_auto_smoothing_is_that_of_a_mean_of_as_many_and_bounded() -> None:
    """(n − 1)/(n + 1): none for one worker, and never more than for 19."""
    assert [auto_smoothing(n) for n in (1, 3, 7, 19, 1008)] == [0.0, 0.5, 0.75, 0.9, 0.9]


@pytest.mark.parametrize(
    ("make", "number"), [(AccumAdamW, "window=4"), (SmoothAdamW, "smoothing=0.8")]
)
def test_auto_must_be_settled_before_a_step(make: Any, number: str) -> None:
    """Without an engine the first step raises, and names what to call, or to pass."""
    (param,) = parameters(1)
    param.grad = gradient(param, 0)
    before = param.detach().clone()
    words = rf"number of workers before .* got none.*decentralize\(\).* such as {number}$"
    with pytest.raises(UserError, match=words):
        make([param]).step()
    assert torch.equal(param, before)


def test_a_settled_window_stays() -> None:
    """It is in the groups and in the state, and another number of workers does not change it."""
    params = parameters()
    groups = [{"params": params[:1]}, {"params": params[1:], "window": 3}]
    optimizer = AccumAdamW(groups)
    unsettled = optimizer.state_dict()
    tell_num_workers(optimizer, 8)
    assert [group["window"] for group in optimizer.param_groups] == [4, 3]
    tell_num_workers(optimizer, 16)
    assert [group["window"] for group in optimizer.param_groups] == [4, 3]

    later = AccumAdamW([{"params": params[:1]}, {"params": params[1:]}])
    tell_num_workers(later, 6)
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["window"] for group in later.param_groups] == [4, 3]
    later.load_state_dict(unsettled)  # of before anyone knew
    assert [group["window"] for group in later.param_groups] == [4, 3]


def test_a_copy_knows_the_number_of_workers() -> None:
    """A group that is added to a copy later is resolved as the others are."""
    optimizer = AccumAdam([nn.Parameter(torch.ones(3))])
    optimizer.set_num_workers(8)
    twin = copy.deepcopy(optimizer)
    twin.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [group["window"] for group in twin.param_groups] == [4, 4]


def test_a_group_that_comes_later_is_settled_too() -> None:
    """The number of workers is known by then; one that is refused is not added."""
    params = parameters()
    optimizer = AccumAdam(params[:1])
    tell_num_workers(optimizer, 8)
    with pytest.raises(UserError, match="betas must be two numbers"):
        optimizer.add_param_group({"params": params[1:], "betas": 0.9})
    optimizer.add_param_group({"params": params[1:]})
    assert [group["window"] for group in optimizer.param_groups] == [4, 4]


def test_a_setting_that_is_auto_again_is_settled_at_the_next_step() -> None:
    """As for a run that one worker began, whose state has no smoothing."""
    params = parameters()
    optimizer = SmoothAdam(params)
    tell_num_workers(optimizer, 1)
    alone = optimizer.state_dict()
    later = SmoothAdam(params)
    tell_num_workers(later, 4)
    later.load_state_dict(alone)
    assert later.param_groups[0]["smoothing"] == 0
    later.param_groups[0]["smoothing"] = "auto"
    run(later, params, range(1))
    assert later.param_groups[0]["smoothing"] == 0.6


@pytest.mark.parametrize(
    ("beta2", "window", "betas_per", "warns"),
    [
        (0.99, 8, "step", False),
        (0.95, 4, "step", True),
        (0.95, 4, "window", False),
        (0.89, 4, "window", True),
        (0.5, 1, "step", False),
        (0.95, "auto", "step", True),
    ],
)
def test_a_second_moment_of_few_windows_is_warned_of(
    beta2: float, window: Any, betas_per: Any, warns: bool
) -> None:
    """As soon as the window is known; the proposed beta does not warn."""
    settings: dict[str, Any] = {"window": window, "betas_per": betas_per}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_num_workers(AccumAdamW(parameters(), betas=(0.9, beta2), **settings), 8)
    assert len(caught) == warns
    if warns:
        proposed = float(str(caught[0].message).split(">= ")[1])
        tell_num_workers(AccumAdamW(parameters(), betas=(0.9, proposed), **settings), 8)


@pytest.mark.parametrize(
    ("beta2", "smoothing", "warns"),
    [
        (0.99, 0.9, False),
        (0.95, 7 / 9, True),
        (0.95, 0.0, False),
        (0.95, "auto", True),
        (0.99, 0.9916, True),
        (0.99, 0.999999, True),
    ],
)
def test_a_second_moment_of_few_squares_is_warned_of(
    beta2: float, smoothing: Any, warns: bool
) -> None:
    """As soon as the smoothing is known; the proposed beta does not warn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = SmoothAdamW(parameters(), betas=(0.9, beta2), smoothing=smoothing)
        tell_num_workers(optimizer, 8)
    assert len(caught) == warns
    if warns:
        proposed = float(str(caught[0].message).split(">= ")[1])
        again = SmoothAdamW(parameters(), betas=(0.9, proposed), smoothing=smoothing)
        tell_num_workers(again, 8)


# - In place of torch's


def adamw_of_two_groups(params: list[nn.Parameter], **settings: Any) -> torch.optim.AdamW:
    first = {"params": params[:1], "weight_decay": 0.2, "betas": (0.8, 0.98), "name": "first"}
    return torch.optim.AdamW([first, {"params": params[1:], "lr": 0.02}], lr=0.01, **settings)


@pytest.mark.parametrize("make", [AccumAdamW.like, SmoothAdamW.like])
def test_betas_that_are_tensors_become_numbers(make: Any) -> None:
    """Torch's optimizer takes both."""
    params, betas = parameters(), (torch.tensor(0.9), torch.tensor(0.99))
    ours = make(torch.optim.AdamW(params, betas=betas, foreach=False))
    tell_num_workers(ours, 4)
    assert ours.param_groups[0]["betas"] == pytest.approx((0.9, 0.99))
    run(ours, params, range(2))


@pytest.mark.parametrize("make", [AccumAdam, SmoothAdam])
def test_scratch_memory_is_not_on_the_default_device(make: Any) -> None:
    """It is where parameters are."""
    params, elsewhere = parameters(), parameters()
    for each, device in ((params, "cpu"), (elsewhere, "meta")):
        optimizer = make(each)
        tell_num_workers(optimizer, 8)
        for param in each:
            param.grad = torch.ones_like(param)
        with torch.device(device):
            optimizer.step()
    for a, b in zip(params, elsewhere, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("num_steps", [0, 4])
@pytest.mark.parametrize(
    "like",
    [partial(AccumAdamW.like, window=1), partial(SmoothAdamW.like, smoothing=0.0)],
    ids=["accum", "smooth"],
)
def test_like_takes_over_groups_and_state(like: Any, num_steps: int) -> None:
    """As for one worker, it continues as the original AdamW, group by group."""
    params, reference = parameters(), parameters()
    adamw, theirs = adamw_of_two_groups(params), adamw_of_two_groups(reference)
    run(adamw, params, range(num_steps))
    ours = like(adamw)
    run(ours, params, range(num_steps, 9))
    run(theirs, reference, range(9))
    for a, b in zip(params, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    first, second = ours.param_groups
    assert (first["name"], first["betas"], first["weight_decay"]) == ("first", (0.8, 0.98), 0.2)
    assert (second["lr"], second["betas"]) == (0.02, (0.9, 0.999))


def test_a_state_of_another_optimizer_is_refused() -> None:
    """A window is no smoothing, and SGD has no betas; the error names whose the state is."""
    params = parameters(1)
    accum, smooth = AccumAdamW(params, window=4), SmoothAdamW(params, smoothing=0.5)
    with pytest.raises(UserError, match=r"window is a setting of AccumAdam, .* use AccumAdamW"):
        smooth.load_state_dict(accum.state_dict())
    with pytest.raises(UserError, match="smoothing is a setting of SmoothAdam"):
        accum.load_state_dict(smooth.state_dict())
    with pytest.raises(UserError, match="window is a setting of AccumAdam"):
        smooth.add_param_group({"params": parameters(1), "window": 4})
    with pytest.raises(UserError, match="torch's Adam, got one whose groups have no betas, eps"):
        smooth.load_state_dict(torch.optim.SGD(params, lr=0.1).state_dict())


def test_a_state_of_adamw_is_smoothed_from_its_next_step() -> None:
    """It loads, keeps our smoothing, and continues as ``like`` does."""
    params = parameters()
    adamw = torch.optim.AdamW(params, lr=0.01)
    run(adamw, params, range(5))
    mine, reference = twins(params), twins(params)
    ours = SmoothAdamW(mine, lr=0.5, smoothing=0.6)
    ours.load_state_dict(copy.deepcopy(adamw.state_dict()))
    theirs = torch.optim.AdamW(reference, lr=0.01)
    theirs.load_state_dict(copy.deepcopy(adamw.state_dict()))
    like = SmoothAdamW.like(theirs, smoothing=0.6)
    run(ours, mine, range(5, 9))
    run(like, reference, range(5, 9))
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True))


def test_groups_of_adamw_mean_the_same() -> None:
    """Betas per step are AdamW's, so its groups can be passed unchanged; they are copied."""
    params, reference = parameters(), parameters()
    adamw = adamw_of_two_groups(params, fused=False)
    ours = AccumAdamW(adamw.param_groups, window=4)
    expected = AccumAdamW.like(adamw_of_two_groups(reference), window=4)
    run(ours, params, range(9))
    run(expected, reference, range(9))
    assert all(torch.equal(a, b) for a, b in zip(params, reference, strict=True))
    assert "window" not in adamw.param_groups[0]
    assert ours.param_groups[0]["betas_per"] == "step"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "needs torch's Adam or AdamW, got SGD; construct"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad must be left out, .* got True"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize must be left out"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "is decoupled, got .* use AccumAdam$"),
    ],
)
def test_what_cannot_be_converted_is_refused(make: Any, words: str) -> None:
    """The error names the difference, and nothing is converted in part."""
    with pytest.raises(UserError, match=words):
        AccumAdamW.like(make(parameters()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Adam(p, maximize=True), "maximize must be left out"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad must be left out"),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1), "weight decay of AccumAdam is L2"),
    ],
)
def test_a_state_of_adam_that_means_something_else_is_refused(make: Any, words: str) -> None:
    """As in its groups; the optimizer is unchanged."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AccumAdam([parameter], lr=0.5, window=2)
    with pytest.raises(UserError, match=words):
        optimizer.load_state_dict(make([parameter]).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(torch.optim.Adam([parameter], lr=0.25, fused=True).state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["window"], "fused" in group) == (0.25, 2, False)


def test_a_step_that_is_refused_moves_nothing() -> None:
    """All groups are checked before the first is updated."""
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    first.grad = second.grad = torch.ones(3)
    optimizer = AccumAdam([{"params": [first], "window": 2}, {"params": [second]}])
    with pytest.raises(UserError, match="needs the number of workers"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))


@pytest.mark.parametrize("make", [partial(AccumAdamW, window=1), *LOCAL.values()])
def test_a_compiled_step_is_the_same(make: Any) -> None:
    """If a user compiles ``optimizer.step``, the update runs outside of the traced graph."""
    plain, compiled = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = [make([p]) for p in (plain, compiled)]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend="aot_eager")]
    for number in range(5):
        for parameter, step in zip((plain, compiled), steps, strict=True):
            parameter.grad = torch.full((3,), 1.0 + number)
            step()
    assert torch.equal(plain, compiled)


def test_memory_is_adams_for_one_worker() -> None:
    """A third tensor is allocated only for a window longer than a step, or with smoothing."""
    for make in (AccumAdam, SmoothAdam):
        params = parameters()
        optimizer = make(params)
        tell_num_workers(optimizer, 1)
        run(optimizer, params, range(2))
        for parameter in params:
            assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_that_it_cannot_take_are_refused(kind: str) -> None:
    """A sparse or complex gradient raises, instead of being treated as a dense real one."""
    dtype = torch.complex128 if kind == "complex" else torch.float64
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    gradient = torch.ones(3, dtype=dtype)
    parameter.grad = gradient.to_sparse() if kind == "sparse" else gradient
    with pytest.raises(UserError, match=f"dense real gradients, got a {kind} one"):
        AccumAdam([parameter], window=1).step()


# - In blocks


def copied(tensors: Tensors) -> Tensors:
    return Tensors(*([tensor.clone() for tensor in of_kind] for of_kind in tensors))


SHAPES = [(7, 5), (), (3,), (0,), (64,), (65,), (200,), (2, 1), (9, 30)]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 6e-2)]
)
def test_blocks_are_the_update_as_it_is_written(
    window: int, decoupled: bool, dtype: torch.dtype, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tensors that share a block, fill one, or are split, and those without a fused kernel.

    In 16 bits the reference rounds after every operation, by about a last place per step.
    """
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 64 * dtype.itemsize)
    generator = torch.Generator().manual_seed(1)

    def random() -> list[Tensor]:
        dense = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
        return [*dense, torch.randn(6, 9, generator=generator, dtype=dtype).T]

    tensors = Tensors(random(), random(), random(), [t.square() + 0.5 for t in random()])
    if window > 1:
        tensors = tensors._replace(grad_means=random())
    expected, in_blocks = copied(tensors), Blocks()
    for step in range(4, 11):
        update = WindowUpdate(step, window, 0.02, (0.8, 0.97), 1e-6, 0.1, decoupled)
        in_blocks.update_(tensors, update)
        update_by_lists_(expected, update)
        torch.testing.assert_close([*tensors], [*expected], rtol=close, atol=close)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("betas", [(0.8, 0.97), (0.0, 0.0)])
@pytest.mark.parametrize("lr", [0.02, 0.0])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-11), (torch.float32, 2e-6)])
def test_smoothing_in_blocks_is_the_update_as_it_is_written(
    weight_decay: float,
    decoupled: bool,
    betas: tuple[float, float],
    lr: float,
    dtype: torch.dtype,
    close: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For tensors that share a block, fill one, or are split, at the first step and late ones, and
    for gradients that are tiny or 0.
    """
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 64 * dtype.itemsize)
    generator = torch.Generator().manual_seed(1)

    def random(scale: float = 1.0) -> list[Tensor]:
        return [scale * torch.randn(s, generator=generator, dtype=dtype) for s in SHAPES]

    grads = random(1e-12)[:2] + [torch.zeros(s, dtype=dtype) for s in SHAPES[2:4]] + random()[4:]
    zeros = ([torch.zeros(s, dtype=dtype) for s in SHAPES] for _ in range(3))
    tensors = Tensors(random(), grads, *zeros)
    expected = copied(tensors)
    for step in (1, 2, 10_000):
        update = SmoothUpdate(step, lr, betas, 0.6, 1e-8, weight_decay, decoupled)
        update_(tensors, update)
        update_by_lists_smoothly_(expected, update)
        torch.testing.assert_close([*tensors], [*expected], rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [SmoothAdam, SmoothAdamW])
@pytest.mark.parametrize("in_blocks", [True, False])
def test_steps_of_16_bits_are_computed_in_32(
    kind: Any, dtype: torch.dtype, in_blocks: bool
) -> None:
    """ε is 0 in 16 bits and a gradient may be 0, too: a step is that of 32 bits, and parameters and
    moments are rounded once.
    """
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(20, 2, generator=generator).to(dtype)
    start[10:] = 0
    start = start if in_blocks else start.T
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizers = [kind([p], lr=0.01, weight_decay=0.1, smoothing=0.8) for p in (narrow, wide)]
    for _ in range(20):
        grad = (torch.rand(start.shape, generator=generator) > 0.5).to(dtype)
        narrow.grad, wide.grad = grad, grad.float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(narrow.float(), wide.detach(), rtol=0.05, atol=0.02)


def test_a_rare_large_gradient_moves_no_further_than_with_adam() -> None:
    """Smoothing alone would follow it less than the first moment does: 1/(1 − a) times the step."""
    spikes = [0.001, *[0.0] * 400, 1000.0, *[0.0] * 40]
    largest = {}
    for make in (partial(SmoothAdam, smoothing=0.9), torch.optim.Adam):
        (param,) = params = [nn.Parameter(torch.zeros(1, dtype=torch.float64))]
        optimizer = make(params, lr=1.0, betas=(0.9, 0.99))
        moves = []
        for spike in spikes:
            before = param.item()
            param.grad = torch.full_like(param, spike)
            optimizer.step()
            moves.append(abs(param.item() - before))
        largest[make] = max(moves[1:])
    ours, adams = largest.values()
    assert ours == pytest.approx(adams, rel=0.05)


@both
def test_parameters_of_several_types_step_together(make: Any) -> None:
    """In one group: each dtype is updated as if it were alone."""
    mixed = [nn.Parameter(torch.ones(5, dtype=d)) for d in (torch.float64, torch.float32)]
    alone = twins(mixed)
    optimizers = [make(mixed), *(make([p]) for p in alone)]
    for step in range(5):
        for pair in zip(mixed, alone, strict=True):
            for parameter in pair:
                parameter.grad = gradient(parameter, step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mixed, alone, strict=True))


@both
def test_a_rate_may_be_a_tensor_and_an_optimizer_be_copied(make: Any) -> None:
    """A deep copy, or one that was pickled, continues equally."""
    params = parameters()
    optimizer = make(params, lr=torch.tensor(0.01, dtype=torch.float64))
    run(optimizer, params, range(3))
    copies = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    run(optimizer, params, range(3, 6))
    for other in copies:
        own = other.param_groups[0]["params"]
        run(other, own, range(3, 6))
        assert all(torch.equal(a, b) for a, b in zip(params, own, strict=True))


@torch.no_grad()
def train_alone(params: list[nn.Parameter], outer: DiLoCo, steps: range) -> None:
    for step in steps:
        for parameter in params:
            parameter.sub_(gradient(parameter, step), alpha=0.1)
        outer.step()


def test_the_outer_step_is_the_papers() -> None:
    """Δ = x₀ − x̄; m ← μ·m + Δ; x₀ ← x₀ − lr·(Δ + μ·m): after each H-th step only."""
    lr, momentum, every = 0.7, 0.9, 3
    params = parameters(1)
    outer = DiLoCo(params, every, lr, momentum)
    x = start = params[0].detach().clone()
    m = torch.zeros_like(x)
    for step in range(1, 10):
        x = x - 0.1 * gradient(x, step)
        if step % every == 0:
            delta = start - x
            m = momentum * m + delta
            x = start = start - lr * (delta + momentum * m)
        train_alone(params, outer, range(step, step + 1))
        torch.testing.assert_close(params[0].detach(), x, rtol=1e-12, atol=1e-13)


def test_an_outer_rate_of_one_without_momentum_changes_nothing() -> None:
    """It is local SGD: workers continue from the average."""
    ours, plain = parameters(), parameters()
    train_alone(ours, DiLoCo(ours, 2, lr=1.0, momentum=0.0), range(7))
    train_alone(plain, DiLoCo(plain, 100), range(7))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_checkpoint_between_two_outer_steps_continues_exactly() -> None:
    """state_dict holds the start, the momentum and the count: the run continues bit for bit."""
    whole = parameters()
    train_alone(whole, DiLoCo(whole, 3), range(10))

    first = parameters()
    outer = DiLoCo(first, 3)
    train_alone(first, outer, range(5))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = DiLoCo(second, 3)
    resumed.load_state_dict(copy.deepcopy(outer.state_dict()))
    train_alone(second, resumed, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))
