"""Properties of the simulation besides parity: chunks, fallbacks, measures, states, errors."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped
from torch.distributed import ProcessGroup
from torch.optim import SGD, Adafactor, AdamW

from gossamer import Simulation, decentralize
from gossamer.errors import UserError
from gossamer.memory import free_bytes, group_bytes
from gossamer.optim import AccumAdamW, SmoothAdamW
from gossamer.simulate import Centralized, mix_, worker_seed
from gossamer.simulate.budget import memory_budget, saved_bytes
from gossamer.simulate.clipping import check_clip_norm, clip_each_
from gossamer.simulate.mixing import _kernel_of, _nothing
from gossamer.topology import Round, parse, ring, spaced
from tests import tasks
from tests.catalogue import ALL_TOPOLOGIES
from tests.ranks import run_ranks
from tests.reference import ORDERS, fill_
from tests.tasks import ALL_TASKS, Task, Tokens, mlp

MLP = ALL_TASKS["mlp"]
CONVNET = ALL_TASKS["convnet"]


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def make(task: Task = MLP, workers: int = 6, topology: Any = "ring", **options: Any) -> Simulation:
    optimizer = options.pop("optimizer", sgd)
    options = {"dtype": torch.float64, "gradients": "vmap"} | options
    return Simulation(task.make(), task.loss, optimizer, workers, topology, **options)


def run(sim: Any, task: Task = MLP, steps: int = 4) -> Any:
    for step in range(sim.num_steps, sim.num_steps + steps):
        sim.step(*tasks.batches(task, sim.num_workers, step))
    return sim


def assert_same(a: Simulation, b: Simulation, atol: float = 1e-12) -> None:
    for own, other in ((a.parameters, b.parameters), (a._replicas.buffers, b._replicas.buffers)):
        torch.testing.assert_close(dict(own), dict(other), rtol=0, atol=atol)


def deep_lstm() -> nn.Module:
    body = nn.LSTM(4, 2, 2, batch_first=True, bidirectional=True, dropout=0.4, bias=False)
    return Tokens(4, body)


class Causal(nn.Module):
    """Attention with a mask that is a buffer, and one that comes from a flag."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        full = torch.full((tasks.TIME, tasks.TIME), -math.inf)
        self.register_buffer("mask", full.triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Attend twice, to what came before."""
        q = self.query(x).unsqueeze(1)
        y = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)
        y = nn.functional.scaled_dot_product_attention(y, q, q, is_causal=True)
        return nn.functional.dropout(y, 0.2, self.training).squeeze(1)


def padded(padding_idx: int) -> nn.Module:
    model = Tokens(4, nn.Tanh())
    model.embedding = nn.Embedding(tasks.VOCABULARY, 4, padding_idx=padding_idx)
    return model


class Attention(nn.Module):
    """Attention of a kind that is given, where the first of a sequence may attend to nothing."""

    def __init__(self, dims: int, mask: str = "none", **options: Any) -> None:
        super().__init__()
        self.query, self.dims, self.mask, self.options = nn.Linear(4, 4), dims, mask, options

    def forward(self, x: Tensor) -> Tensor:
        """Attend once."""
        q = self.query(x)
        q = q.unsqueeze(1) if self.dims == 4 else q
        allowed = torch.ones(tasks.TIME, tasks.TIME, dtype=torch.bool).tril(-1)
        added = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, -math.inf)
        masks = {"none": None, "bool": allowed, "float": added, "heads": added[None, None]}
        mask = masks[self.mask] if self.mask != "samples" else added.expand(len(x), 1, -1, -1)
        y = nn.functional.scaled_dot_product_attention(q, q, q, mask, **self.options)
        return x + (y.squeeze(1) if self.dims == 4 else y)


class Heads(nn.Module):
    """A module's self-attention, with what its forward pass may be given."""

    def __init__(self, given: str = "nothing", **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, **{"batch_first": True} | options)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        """Attend once."""
        allowed = torch.ones(tasks.TIME, tasks.TIME, dtype=torch.bool).tril()
        options: dict[str, Any] = {
            "nothing": {},
            "causal": {"attn_mask": ~allowed, "is_causal": True},
            "mask": {"attn_mask": ~allowed},
            "padding": {"key_padding_mask": x[..., 0] > x[..., 0].amin(1, keepdim=True)},
            "weights": {"need_weights": True},
            "others": {},
        }[self.given]
        others = x.flip(1) if self.given == "others" else x
        return x + self.inner(x, others, others, **{"need_weights": False} | options)[0]


class Dropouts(nn.Module):
    """Dropout in place, with everything dropped, with nothing dropped; arguments by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Use what has been changed in place."""
        y = nn.functional.linear(input=x, weight=self.linear.weight, bias=self.linear.bias)
        z = nn.functional.dropout(input=y, p=0.5, inplace=True)
        z = z + nn.functional.dropout(y, 1.0) + nn.functional.dropout(y, 0.0)
        return y + nn.functional.dropout(z, 0.3) + nn.functional.dropout(2 * z, 1.0, inplace=True)


ALL_ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "bool mask": lambda: Attention(4, "bool"),
    "bool mask, three dimensions": lambda: Attention(3, "bool"),
    "float mask, three dimensions": lambda: Attention(3, "float"),
    "one mask of four dimensions": lambda: Attention(4, "heads"),
    "a mask for each sample": lambda: Attention(4, "samples"),
    "bool mask, dropout": lambda: Attention(4, "bool", dropout_p=0.3),
    "float mask, dropout": lambda: Attention(4, "float", dropout_p=0.3),
    "scale of zero": lambda: Attention(4, scale=0.0),
    "scale of zero, three dimensions": lambda: Attention(3, scale=0.0),
    "scale, dropout": lambda: Attention(4, scale=2.0, dropout_p=0.3, is_causal=True),
    "everything dropped": lambda: Attention(4, dropout_p=1.0),
    "dropout in other ways": Dropouts,
    "heads": Heads,
    "heads, causal": lambda: Heads("causal"),
    "heads, mask": lambda: Heads("mask"),
    "heads, padding": lambda: Heads("padding"),
    "heads, weights": lambda: Heads("weights"),
    "heads, others": lambda: Heads("others"),
    "heads, batch second": lambda: Heads(batch_first=False),
    "heads, no biases": lambda: Heads(bias=False),
    "heads, dropout": lambda: Heads(dropout=0.3),
    "heads, own biases": lambda: Heads(add_bias_kv=True),
    "heads, zeros": lambda: Heads(add_zero_attn=True),
    "heads, three weights": lambda: Heads("others", kdim=4, vdim=4),
}


@pytest.mark.parametrize("name", ALL_ATTENTION)
def test_kernels_are_torchs_functions(name: str) -> None:
    """Rows that are masked, options at their limits, arguments by name: as in the loop."""
    task = Task(lambda: Tokens(4, ALL_ATTENTION[name]()), tasks.tokens)
    together = run(make(task, gradients="vmap"), task)
    assert all(bool(p.isfinite().all()) for p in together.parameters.values())
    assert_same(together, run(make(task, gradients="loop"), task))
    assert together.state_dict()["gradients"]["chunk"] > 0


@pytest.mark.parametrize("options", [{"dims": 3}, {"dims": 4, "dropout_p": 0.3}])
def test_kernels_refuse_what_torch_refuses(options: dict[str, Any]) -> None:
    """A mask together with is_causal is torch's error, for every method."""
    body = Attention(mask="bool", is_causal=True, **options)
    task = Task(lambda: Tokens(4, body), tasks.tokens)
    for gradients in ("vmap", "loop"):
        with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
            run(make(task, gradients=gradients), task, steps=1)


ALL_LAYERS = ALL_TASKS | {
    "embedding with padding": Task(lambda: padded(2), tasks.tokens),
    "embedding with padding at the end": Task(lambda: padded(-1), tasks.tokens),
    "transformer with dropout": Task(lambda: tasks.transformer(dropout=0.3), tasks.tokens),
    "deep LSTM": Task(deep_lstm, tasks.tokens),
    "causal attention": Task(lambda: Tokens(4, Causal()), tasks.tokens),
}


@pytest.mark.parametrize("name", ALL_LAYERS)
def test_together_equals_one_by_one(name: str) -> None:
    """Under vmap, with our kernels: the parameters, statistics and dropout masks of the loop."""
    task = ALL_LAYERS[name]
    together = run(make(task, gradients="vmap"), task)
    assert_same(together, run(make(task, gradients="loop"), task))
    assert together.state_dict()["gradients"]["chunk"] > 0


@pytest.mark.parametrize("frozen", ["", "body.weight", "body.weight_hh", "body.bias", "embedding"])
@pytest.mark.parametrize("kind", [Simulation, Centralized])
def test_lstms_of_which_a_part_is_frozen(kind: Any, frozen: str) -> None:
    """What is the same for all workers has no dimension of them: weights, inputs' gradients."""
    task = ALL_TASKS["lstm"]
    model = task.make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    options: dict[str, Any] = {"dtype": torch.float64}
    sims = [kind(model, task.loss, sgd, 6, gradients=g, **options) for g in ("vmap", "loop")]
    together, apart = (run(sim, task) for sim in sims)
    torch.testing.assert_close(together.parameters, apart.parameters, rtol=0, atol=1e-12)
    assert together.state_dict()["gradients"]["chunk"] > 0


def test_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    """Its limit less what it uses, without files that it can drop; infinite without a limit."""
    assert group_bytes(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("max\n")
    assert group_bytes(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert group_bytes(tmp_path) == 450
    assert free_bytes() > 0


def test_memory_for_activations_by_its_rule() -> None:
    """The bound by copies of all parameters or 24 MB in total, and the free memory."""
    copies: dict[str, Any] = {"model_bytes": 10**6, "state_bytes": 10**6, "num_workers": 100}
    assert memory_budget(1.0, **copies) == (0.7e8, 3.5e8)
    assert memory_budget(0.4, **copies) == (0.7e8, 0.5e8)
    assert memory_budget(1.0, one_model=True, **copies) == (0.7e8, 4.985e8)
    few = memory_budget(1.0, 10**6, 10**6, num_workers=2)
    assert few.good == ((24 << 20) - 6e6) / 2
    with pytest.raises(
        UserError, match=r"state of the model take 0\.003 GB, .*; use a smaller model"
    ):
        memory_budget(0.002, one_model=True, **copies)


def test_a_worker_that_does_not_fit_is_tried_alone_and_said() -> None:
    """No more than one worker at a time, and one warning."""
    evaluated: list[int] = []

    class Wide(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            evaluated.append(get_unwrapped(input).shape[0])
            return super().forward(input).tanh().tanh()

    task = Task(lambda: Wide(9, 7), tasks.vectors)
    sim = make(task)
    stacked = 3 * sum(p.nbytes for p in sim.parameters.values())
    sim = make(task, memory_gb=(stacked + 200) / 1e9)
    with pytest.warns(UserWarning, match="activations of one worker take about .* MB") as caught:
        run(sim, task, steps=1)
    assert len(caught) == 1
    run(sim, task, steps=3)
    assert set(evaluated) == {1}
    assert_same(sim, run(make(task), task))


def test_memory_that_is_kept_is_counted_by_storage() -> None:
    """A view keeps its entire storage; an expanded number counts once."""
    given = torch.ones(100, requires_grad=True)
    with saved_bytes([given]) as saved:
        large = given * 2
        loss = (large[:3] * given.sum().expand(3)).sin().sum()
    loss.backward()
    assert sorted(saved.values()) == [4, 12, 400]


@pytest.mark.filterwarnings("ignore:activations of one worker")
@pytest.mark.filterwarnings("ignore:there is memory for the activations of")
@pytest.mark.parametrize("name", ALL_LAYERS)
def test_chunks_change_nothing(name: str, threads: Callable[[int], None]) -> None:
    """Less memory makes smaller chunks with the same results."""
    threads(1)
    task = ALL_LAYERS[name]
    whole = run(make(task, gradients="vmap"), task)
    stacked = 3 * sum(p.nbytes for p in whole.parameters.values())
    stacked += sum(b.nbytes for b in whole._replicas.buffers.values())
    seen: set[int] = set()
    for exponent in range(10, 18):
        chunked = run(make(task, memory_gb=(stacked + 2**exponent) / 1e9), task, steps=1)
        chunk = chunked.state_dict()["gradients"]["chunk"]
        if chunk not in seen:
            assert_same(run(chunked, task, steps=3), whole)
        seen.add(chunk)
        if chunk == 6:
            break
    assert 1 in seen
    assert seen & {2, 3, 4, 5}
    assert 6 in seen


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["convnet", "deep LSTM", "transformer with dropout"])
def test_threads_change_nothing(name: str, threads: Callable[[int], None]) -> None:
    """The number of threads does not matter, also for statistics and masks."""
    task = ALL_LAYERS[name]
    threads(1)
    alone = run(make(task), task)
    threads(3)
    assert_same(run(make(task), task), alone)


def test_autocast_holds_for_all_workers() -> None:
    """An autocast context around a step applies to every worker's forward pass."""
    seen: set[torch.dtype] = set()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.add(output.dtype)
        return MLP.loss(output, target)

    sim = Simulation(MLP.make(), loss, sgd, 6, "ring", gradients="vmap")
    with torch.autocast("cpu", torch.bfloat16):
        run(sim, steps=2)
    assert seen == {torch.bfloat16}


class Crossed(nn.Module):
    """Weights that a linear layer gets in part, transposed, twice, and with another sign."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(9, 9)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by each."""
        linear = nn.functional.linear
        x = linear(linear(x, self.a), self.a) + linear(x, self.b.T)
        return linear(x, self.c[:7]) - linear(x[..., :7], self.c[:7, :7].contiguous())


def test_gradients_of_weights_that_are_not_used_as_they_are() -> None:
    """Kernels write in place only the complete gradient of a parameter."""
    task = Task(Crossed, tasks.vectors)
    assert_same(run(make(task), task), run(make(task, gradients="loop"), task))


class Constant(nn.Module):
    """Layers that get the same from all workers: frozen, on tensors that are none of the batch."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(9, 9), nn.LSTM(9, 9, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)
        self.bias, self.last = nn.Linear(9, 9), nn.Linear(9, 7)
        for part in (self.linear, self.lstm, self.attention):
            part.requires_grad_(False)
        self.bias.weight.requires_grad_(False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Scale what comes in by what does not depend on it."""
        same = torch.linspace(-1, 1, 18, dtype=x.dtype).view(1, 2, 9)
        same = self.lstm(self.linear(same))[0]
        same = same + self.attention(same, same, same)[0]
        shift = nn.functional.cross_entropy(same[0], torch.ones(2, dtype=torch.long))
        if self.dropout:
            same = nn.functional.dropout(same, 0.5)
        return self.last(x * self.bias(same)[0, 1] + shift)


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("kind", [Simulation, Centralized])
def test_what_is_the_same_for_all_workers(kind: Any, dropout: bool) -> None:
    """It is computed once; masks are still drawn for each worker."""
    task = Task(lambda: Constant(dropout), tasks.vectors)
    options: dict[str, Any] = {"dtype": torch.float64}
    sims = [kind(task.make(), task.loss, sgd, 6, gradients=g, **options) for g in ("vmap", "loop")]
    together, apart = (run(sim, task) for sim in sims)
    torch.testing.assert_close(together.parameters, apart.parameters, rtol=0, atol=1e-12)
    assert together.state_dict()["gradients"]["chunk"] > 0


def weighted(y: Tensor, target: Tensor) -> Tensor:
    weights = torch.arange(1.0, 1 + tasks.VOCABULARY, dtype=y.dtype)
    return nn.functional.cross_entropy(y, target, weights)


def of_probabilities(y: Tensor, target: Tensor) -> Tensor:
    shares = nn.functional.one_hot(target, tasks.VOCABULARY).to(y.dtype)
    return nn.functional.cross_entropy(y, 0.9 * shares)


ALL_CROSS_ENTROPIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "targets that are ignored": nn.CrossEntropyLoss(ignore_index=2),
    "smooth, some ignored": nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.2),
    "several targets of a sample": lambda y, target: nn.functional.cross_entropy(
        torch.stack([y, 2 * y], 2), torch.stack([target, target.flip(0)], 1), ignore_index=2
    ),
    "more classes": lambda y, target: nn.functional.cross_entropy(
        torch.cat([y, 2 * y, -y], 1), target
    ),
    "one sample, no batch": lambda y, target: nn.functional.cross_entropy(y[0], target[0]),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "none": lambda y, target: nn.functional.cross_entropy(y, target, reduction="none").amax(),
    "weights of classes": weighted,
    "probabilities": of_probabilities,
}


@pytest.mark.parametrize("name", ALL_CROSS_ENTROPIES)
def test_cross_entropy_is_torchs(name: str) -> None:
    """Its kernel counts the targets of each worker; unsupported options use torch's."""
    task = Task(tasks.mlp, tasks.vectors, ALL_CROSS_ENTROPIES[name])
    together = run(make(task, gradients="vmap"), task)
    assert_same(together, run(make(task, gradients="loop"), task))
    assert together.state_dict()["gradients"]["chunk"] > 0


def test_workers_draw_from_their_own_seeds() -> None:
    """A rank that seeds torch with worker_seed before its forward pass gets the same masks."""
    task = ALL_LAYERS["transformer with dropout"]
    sim = make(task, workers=3, seed=5)
    losses = sim.step(*tasks.batches(task, 3, 0))
    model = task.make()
    for worker in range(3):
        inputs, targets = task.batch(worker, 0)
        torch.manual_seed(worker_seed(5, worker, 0))
        torch.testing.assert_close(losses[worker], task.loss(model(inputs), targets).detach())
    assert len({worker_seed(5, w, t) for w in range(50) for t in range(50)}) == 2500


def test_the_global_generator_is_left_alone() -> None:
    """A simulation that draws masks does not change what a user draws next."""
    task = ALL_LAYERS["transformer with dropout"]
    torch.manual_seed(3)
    expected = torch.rand(2)
    for gradients in ("loop", "vmap"):
        sim = make(task, gradients=gradients)
        torch.manual_seed(3)
        run(sim, task, steps=1)
        assert torch.equal(torch.rand(2), expected)


class Branch(nn.Module):
    """Data-dependent control flow, which vmap does not support."""

    def forward(self, x: Tensor) -> Tensor:
        """Halve what is large."""
        return x / 2 if bool(x.abs().max() > 1) else x


def branching() -> nn.Module:
    model = tasks.convnet()
    assert isinstance(model, nn.Sequential)
    model.insert(5, Branch())
    return model


def test_what_vmap_refuses_runs_in_a_loop() -> None:
    """One warning, which names the layer; statistics count each batch once."""
    task = Task(branching, tasks.vectors)
    sim = make(task, gradients="auto")
    with pytest.warns(UserWarning, match=r"layer '5' \(Branch\)") as caught:
        sim.step(*tasks.batches(task, 6, 0))
    assert len(caught) == 1
    run(sim, task, steps=3)  # a second warning would be an error
    assert_same(sim, run(make(task, gradients="loop"), task))


@pytest.mark.parametrize(
    "option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_embeddings_that_vmap_would_get_wrong_run_in_a_loop(option: dict[str, Any]) -> None:
    """A stacked table has other norms and frequencies than each worker's own."""

    def build() -> nn.Module:
        model = Tokens(4, nn.Tanh())
        model.embedding = nn.Embedding(tasks.VOCABULARY, 4, **option)
        return model

    task = Task(build, tasks.tokens)
    sim = make(task, order="atc")
    with pytest.warns(UserWarning, match=r"layer 'embedding' \(Embedding\)"):
        sim.step(*tasks.batches(task, 6, 0))
    run(sim, task, steps=3)
    models = tasks.train(task, parse("ring", 6), "atc", sgd, 4)
    for worker, model in enumerate(models):
        torch.testing.assert_close(
            sim.worker(worker).state_dict(), model.state_dict(), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("workers", [1, 2, 5, 40])
def test_the_rule_changes_nothing(workers: int) -> None:
    """For every choice, each worker is computed once per step, also in the first step."""
    auto = run(make(CONVNET, workers, "complete", gradients="auto"), CONVNET, steps=14)
    assert auto.state_dict()["gradients"]["chunk"] is not None
    fixed = run(make(CONVNET, workers, "complete"), CONVNET, steps=14)
    assert_same(auto, fixed, atol=1e-10)


class Keeps(nn.Module):
    """A layer that keeps so many numbers of each worker for its backward pass."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self._times = numbers // (9 * tasks.BATCH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute what is hardly used."""
        return x + x.repeat(1, self._times).tanh()[:, :9]


@pytest.mark.parametrize(
    ("numbers", "workers", "chunk"),
    [(30, 3, 0), (30, 4, 4), (30, 40, 40), (20_000, 5, 5), (200_000, 5, 0), (20_000, 200, 67)],
)
def test_the_method_follows_from_numbers(numbers: int, workers: int, chunk: int) -> None:
    """A loop for few workers and large layers, equal chunks for others: nothing is timed."""
    task = Task(lambda: nn.Sequential(nn.Linear(9, 9), Keeps(numbers)), tasks.vectors)
    sim = run(make(task, workers, gradients="auto"), task, steps=1)
    assert sim.state_dict()["gradients"]["chunk"] == chunk


def test_memory_decides_on_chunks_and_not_on_the_method() -> None:
    """With less memory than the rule would use, chunks are smaller, with a warning."""
    rich = run(make(gradients="auto"), steps=1).state_dict()
    stacked = 3 * sum(p.nbytes for p in rich["parameters"].values())
    worker_bytes = rich["gradients"]["worker_bytes"]
    poor = make(gradients="auto", memory_gb=(stacked + 2 * 2.5 * worker_bytes) / 1e9)
    with pytest.warns(UserWarning, match="activations of 2 workers at a time, where 6 would be"):
        run(poor, steps=1)
    assert poor.state_dict()["gradients"]["chunk"] == 2


def by_shape(params: Any) -> SGD:
    """Decay for matrices only: a factory that depends on shapes."""
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}]
    return SGD([*groups, {"params": [p for p in params if p.dim() <= 1]}], lr=0.1)


class Clipped(SGD):
    """Gradients of all that it holds are clipped to a joint norm."""

    def __init__(self, params: Any, max_norm: float, after: int = 0) -> None:
        super().__init__(params, lr=0.1)
        self.max_norm, self.left = max_norm, after

    def step(self, closure: Any = None) -> Any:
        """Clip, then step."""
        self.left -= 1
        if self.left < 0:
            held = [p for group in self.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, self.max_norm)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "per_worker"),
    [
        *((lambda p, c=c: Clipped(p, c), True) for c in (1e-4, 1e-2, 1.0, 10.0, 1e4, 1e6)),
        (lambda p: Clipped(p, 0.1, after=3), True),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, fused=True), False),
        (lambda p: torch.optim.RMSprop(p, lr=0.01), False),
        (lambda p: Adafactor(p, lr=0.05), True),
        (lambda p: AccumAdamW(p, lr=0.05), False),
        (lambda p: SmoothAdamW(p, lr=0.05), False),
        (by_shape, True),
        (lambda p: AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], lr=0.01), False),
    ],
)
def test_an_optimizer_per_worker_where_it_must_be(
    optimizer: Callable[[Any], Any], per_worker: bool
) -> None:
    """Optimizers that depend on whole tensors or shapes equal those of separate workers, too."""
    sim = run(make(optimizer=optimizer))
    models = tasks.train(MLP, parse("ring", 6), "awc", lambda p: optimizer(list(p)), 4)
    for worker, model in enumerate(models):
        torch.testing.assert_close(
            sim.worker(worker).state_dict(), model.state_dict(), rtol=0, atol=1e-10
        )
    first = sim.optimizer.param_groups[0]["params"][0]
    assert (first.dim() == 2) == per_worker


class Largest(torch.optim.Optimizer):
    """Divides by the largest norm so far and by the count of steps, both kept in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "largest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step by the rate over both."""
        for group in self.param_groups:
            norm = sum(float(p.grad.norm()) for p in group["params"])
            group["count"] += 1
            group["largest"] = max(group["largest"], norm)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["largest"] / group["count"])


def test_each_worker_is_clipped_by_its_own_norm() -> None:
    """As torch clips it alone: one that is small stays to the bit, one without gradients too."""
    generator = torch.Generator().manual_seed(0)
    stacked = [nn.Parameter(torch.zeros(3, *shape)) for shape in ((4, 2), (), (0, 3), (2,))]
    size_of_worker = torch.tensor([0.01, 1.0, 100.0])
    for p in stacked[:3]:
        noise = torch.randn(p.shape, generator=generator)
        p.grad = noise * size_of_worker.view(3, *[1] * (p.dim() - 1))
    apart = [[nn.Parameter(p.detach()[w].clone()) for p in stacked[:3]] for w in range(3)]
    for w, own in enumerate(apart):
        for p, q in zip(own, stacked, strict=False):
            assert q.grad is not None
            p.grad = q.grad[w].clone()
        nn.utils.clip_grad_norm_(own, 1.5)
    clip_each_(stacked, 1.5)
    for w, own in enumerate(apart):
        for p, q in zip(own, stacked, strict=False):
            assert q.grad is not None
            tolerance = 1e-6 if w else 0.0  # the first worker's are small enough
            torch.testing.assert_close(q.grad[w], p.grad, rtol=tolerance, atol=0.0)
    with pytest.raises(UserError, match="clip_norm must be at least 0, got nan"):
        check_clip_norm(math.nan)


def test_what_an_optimizer_keeps_in_its_groups_is_each_workers_own() -> None:
    """Counts and norms are per worker; a scheduler changes the rate of all workers once."""
    sim = run(make(optimizer=Largest, order="atc"))
    models = tasks.train(MLP, parse("ring", 6), "atc", Largest, 4)
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
    for worker, model in enumerate(models):
        torch.testing.assert_close(sim.worker(worker).state_dict(), model.state_dict(), **close)
    sim.optimizer.param_groups[0]["lr"] = 0.02
    groups = [w["param_groups"][0] for w in sim.state_dict()["optimizer"]["workers"]]
    assert {(group["lr"], group["count"]) for group in groups} == {(0.02, 4)}
    assert len({group["largest"] for group in groups}) == 6


@pytest.mark.parametrize("optimizer", [sgd, lambda p: Adafactor(p, lr=0.05)])
def test_learning_rate_schedulers_reach_all_workers(optimizer: Callable[[Any], Any]) -> None:
    """A torch scheduler on sim.optimizer: with a rate of zero workers mix and nothing else."""
    sim = make(optimizer=optimizer, topology="ring", order="atc")
    scheduler = torch.optim.lr_scheduler.LambdaLR(sim.optimizer, lambda epoch: float(epoch == 0))
    run(sim, steps=1)
    scheduler.step()
    before = {name: p.clone() for name, p in sim.parameters.items()}
    for tensor in before.values():
        mix_(tensor, ring(6))
    run(sim, steps=1)
    torch.testing.assert_close(sim.parameters, before, rtol=0, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("buffers", ["average", "local", "mix"])
def test_statistics_follow_their_policy_as_on_ranks(buffers: str, order: str) -> None:
    """Running statistics of workers and of the average equal those of four ranks."""

    def body(group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = CONVNET.make()
        optimizer = sgd(model.parameters())
        gossip = decentralize(
            model, optimizer, "star", process_group=group, order=order, buffers=buffers
        )
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = CONVNET.batch(group.rank(), step)
            CONVNET.loss(model(inputs), targets).backward()
            optimizer.step()
        with gossip.averaged():
            averaged = {name: t.clone() for name, t in model.state_dict().items()}
        gossip.close()
        return averaged, model.state_dict()

    sim = run(make(CONVNET, 4, "star", order=order, buffers=buffers), CONVNET)
    ranks = run_ranks(4, body)
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(sim.average().state_dict(), ranks[0][0], **close)
    for worker, (_, state) in enumerate(ranks):
        torch.testing.assert_close(sim.worker(worker).state_dict(), state, **close)


def test_gossip_steps_messages_and_distance_as_on_ranks() -> None:
    """Three rounds of atc per step: parameters, Ξ, messages and bytes equal those of ranks."""
    task = Task(lambda: nn.Linear(8, 8, bias=False), lambda w, t: _eights(w, t))

    def body(group: ProcessGroup) -> tuple[Tensor, float, int, int]:
        model = task.make()
        optimizer = sgd(model.parameters())
        gossip = decentralize(
            model, optimizer, "ring", process_group=group, order="atc", gossip_steps=3
        )
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = task.batch(group.rank(), step)
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        counts = gossip.messages_sent, gossip.bytes_sent
        distance = gossip.consensus_distance()
        gossip.close()
        return next(model.parameters()).detach(), distance, *counts

    sim = run(make(task, 5, "ring", order="atc", gossip_steps=3), task)
    for worker, (weight, distance, messages, num_bytes) in enumerate(run_ranks(5, body)):
        torch.testing.assert_close(sim.parameters["weight"][worker], weight, rtol=0, atol=1e-10)
        assert sim.consensus_distance() == pytest.approx(distance, rel=1e-9)
        assert (sim.messages_sent[worker], sim.bytes_sent[worker]) == (messages, num_bytes)


def _eights(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * worker + step)
    inputs = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(8, (3,), generator=generator)


@pytest.mark.parametrize("num_workers", [2, 5, 7])
@pytest.mark.parametrize("text", ["ring", "exponential", "one_peer_exponential"])
def test_shifted_rows_go_round_any_number_of_workers(text: str, num_workers: int) -> None:
    """Shifts that coincide or wrap around still give W x."""
    round = parse(text, num_workers).round(1)
    x_WN = torch.randn(num_workers, 3, dtype=torch.float64)
    expected = round.matrix().toarray() @ x_WN.numpy()
    mix_(x_WN, round)
    np.testing.assert_allclose(x_WN.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_workers", [8, 16, 32])
@pytest.mark.parametrize("text", ALL_TOPOLOGIES)
def test_mixing_is_the_matrix_product(text: str, num_workers: int) -> None:
    """Means, shifts, dense and sparse products: all are W x, also across blocks of columns."""
    schedule = parse(text, num_workers)
    generator = torch.Generator().manual_seed(0)
    x_WN = torch.randn(num_workers, 6_000, 3, generator=generator, dtype=torch.float64)
    for step in range(2):
        expected = np.tensordot(schedule.round(step).matrix().toarray(), x_WN.numpy(), axes=1)
        mix_(x_WN, schedule.round(step))
        np.testing.assert_allclose(x_WN.numpy(), expected, rtol=0, atol=1e-13)


def test_a_round_without_neighbours_costs_nothing() -> None:
    """Between the averages of local SGD parameters are not read."""
    round = spaced(parse("complete", 8), 4).round(0)
    assert _kernel_of(round, torch.float32, torch.device("cpu")) is _nothing


def test_norms_and_distance_by_their_definitions() -> None:
    """Ξ² = (1/W) Σ ‖x̄ − x_i‖², and a norm per tensor and worker."""
    sim = run(make())
    vectors = torch.stack(
        [nn.utils.parameters_to_vector(sim.worker(i).parameters()) for i in range(6)]
    ).detach()
    spread = ((vectors - vectors.mean(0)) ** 2).sum(1).mean().sqrt()
    assert sim.consensus_distance() == pytest.approx(float(spread), rel=1e-12)
    mean = nn.utils.parameters_to_vector(sim.average().parameters())
    torch.testing.assert_close(mean.detach(), vectors.mean(0), rtol=0, atol=1e-12)
    for name, norm_W in sim.norms().items():
        for worker in range(6):
            own = dict(sim.worker(worker).named_parameters())[name]
            torch.testing.assert_close(norm_W[worker], own.detach().norm())


def test_a_given_round_replaces_the_schedules() -> None:
    """A controller may choose the round of each step."""
    chosen, scheduled = make(topology="complete"), make(topology="ring")
    for step in range(3):
        batch = tasks.batches(MLP, 6, step)
        chosen.step(*batch, round=ring(6))
        scheduled.step(*batch)
    assert_same(chosen, scheduled, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("round", [ring(5), ring(7), parse("complete", 5).round(0)])
def test_a_given_round_must_be_on_all_workers(round: Round, order: str) -> None:
    """Refused before anything has changed, whatever the kind of round."""
    sim = run(make(CONVNET, order=order), CONVNET, steps=2)
    before = copy.deepcopy(sim.state_dict())
    message = f"on the 6 workers that it mixes, got one on {round.num_workers}"
    with pytest.raises(UserError, match=message):
        sim.step(*tasks.batches(CONVNET, 6, 2), round=round)
    with pytest.raises(UserError, match=message):
        mix_(sim.parameters["1.weight"], round)
    after = sim.state_dict()
    for part in ("parameters", "buffers"):
        torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", [AdamW, lambda p: Adafactor(p, lr=0.05)])
def test_a_loaded_state_continues_bit_for_bit(optimizer: Any) -> None:
    """Dropout masks, moments, statistics and the method chosen: all continue."""
    task = ALL_LAYERS["transformer with dropout"]
    options: dict[str, Any] = {"optimizer": optimizer, "topology": "one_peer_ring"}
    first = run(make(task, **options), task, steps=3)
    second = make(task, **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_same(run(first, task, steps=3), run(second, task, steps=3), atol=0)
    assert first.bytes_sent.tolist() == second.bytes_sent.tolist()
    with pytest.raises(UserError, match="a state must have the parameters of this simulation"):
        make(task, 3, **options).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("method", "saved", "chunk"),
    [("loop", 6, 0), ("vmap", 0, 6), ("vmap", 3, 3), ("auto", 0, 0), ("auto", 3, 3)],
)
def test_a_state_does_not_change_a_method_that_is_fixed(
    method: str, saved: int, chunk: int
) -> None:
    """A fixed method is kept; "auto" uses the method of the state."""
    state = run(make(), steps=1).state_dict()
    state["gradients"]["chunk"] = saved
    for steps in (0, 1):  # whether this one has run before or not
        sim = run(make(gradients=method), steps=steps)
        sim.load_state_dict(copy.deepcopy(state))
        run(sim, steps=1)
        assert sim.state_dict()["gradients"]["chunk"] == chunk


def test_a_state_without_a_chunk_decides_nothing() -> None:
    """A state from before the first step, or of an older version, does not change the method."""
    state = run(make(gradients="auto"), steps=1).state_dict()
    state["gradients"]["chunk"] = None
    for steps in (0, 1):
        sim = run(make(gradients="auto"), steps=steps)
        sim.load_state_dict(copy.deepcopy(state))
        assert run(sim, steps=1).state_dict()["gradients"]["chunk"] == 6


def test_chunks_of_a_state_keep_to_the_memory_here() -> None:
    """A state of a large machine makes smaller chunks on a small one."""
    large = run(make(), steps=1)
    stacked = 3 * sum(p.nbytes for p in large.parameters.values())
    worker_bytes = large.state_dict()["gradients"]["worker_bytes"]
    small = make(memory_gb=(stacked + 2 * 2.5 * worker_bytes) / 1e9)
    small.load_state_dict(copy.deepcopy(large.state_dict()))
    assert small.state_dict()["gradients"]["chunk"] == 2
    assert_same(run(small), run(large))


def test_the_template_is_not_modified() -> None:
    """A model that is given stays as it is, in its dtype."""
    model = CONVNET.make().float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(Simulation(model, CONVNET.loss, sgd, 6, "ring", dtype=torch.float64), CONVNET)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class TwoInputs(nn.Module):
    """A model of two arguments, one parameter that is frozen and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(9, 7), nn.Linear(9, 7)
        self.right.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Add what two layers say."""
        return self.left(a) + self.right(b)


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_several_inputs_frozen_and_unused_parameters(gradients: str) -> None:
    """Tuples and dicts are arguments; an unused parameter keeps its value despite weight decay."""
    model = TwoInputs().double()
    fill_(model)
    options: dict[str, Any] = {"dtype": torch.float64, "gradients": gradients}
    sims = [Simulation(model, MLP.loss, AdamW, 4, "ring", **options) for _ in range(2)]
    inputs, targets = tasks.batches(MLP, 4, 0)
    sims[0].step((inputs, 2 * inputs), targets)
    sims[1].step({"b": 2 * inputs, "a": inputs}, targets)
    assert_same(*sims, atol=0)
    trained = sims[0].worker(1)
    assert torch.equal(trained.get_parameter("unused"), model.unused)
    assert torch.equal(trained.get_parameter("right.weight"), model.right.weight)
    assert not torch.equal(trained.get_parameter("left.weight"), model.left.weight)


class Twice(nn.Module):
    """One layer under two names, one weight in two layers, and an activation that is kept."""

    def __init__(self) -> None:
        super().__init__()
        first, norm, second = nn.Linear(9, 9), nn.BatchNorm1d(9), nn.Linear(9, 9)
        second.weight = first.weight
        self.layers = nn.Sequential(first, norm, nn.Tanh(), first, norm, second)
        self.last = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Keep what comes out."""
        self.last = self.layers(x)
        return self.last


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_shared_layers_and_what_a_forward_pass_leaves_behind(gradients: str) -> None:
    """Workers equal separate modules, and copies of them can be had after a step."""
    task = Task(Twice, tasks.vectors)
    models = tasks.train(task, parse("ring", 6), "atc", sgd, 4)
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
    sim = run(make(task, order="atc", gradients=gradients), task)
    for worker, model in enumerate(models):
        torch.testing.assert_close(sim.worker(worker).state_dict(), model.state_dict(), **close)
    assert sim.average()(tasks.vectors(0, 0)[0]).shape == (tasks.BATCH, 9)
    central = Centralized(task.make(), task.loss, sgd, 6, gradients=gradients, dtype=torch.float64)
    run(central, task)
    model = central.average()
    assert model(tasks.vectors(0, 0)[0]).shape == (tasks.BATCH, 9)
    torch.testing.assert_close(dict(model.named_parameters()), central.parameters, **close)


class Frozen(nn.BatchNorm1d):
    """Normalizes by its running statistics in training too."""

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        return super().train(False)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "of vectors": lambda: nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ReLU(inplace=True)),
    "of sequences": lambda: nn.Sequential(nn.Unflatten(1, (3, 3)), nn.BatchNorm1d(3), nn.Flatten()),
    "of inputs": lambda: nn.BatchNorm1d(9, momentum=0.3, eps=0.1),
    "without weights": lambda: nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9, affine=False)),
    "without statistics": lambda: nn.BatchNorm1d(9, track_running_stats=False),
    "frozen": lambda: nn.Sequential(nn.Linear(9, 9), Frozen(9)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_batch_normalization_is_each_workers_own(kind: str) -> None:
    """Parameters and running statistics equal separate modules'; central ones worker 0's."""
    task = Task(lambda: nn.Sequential(NORMS[kind](), mlp()), tasks.vectors)
    models = tasks.train(task, parse("ring", 6), "atc", sgd, 4)
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # in the loop it would be equal, too
        sim = run(make(task, order="atc"), task)
    for worker, model in enumerate(models):
        torch.testing.assert_close(sim.worker(worker).state_dict(), model.state_dict(), **close)
    central = Centralized(task.make(), task.loss, sgd, 6, dtype=torch.float64, gradients="vmap")
    run(central, task, steps=1)
    model = task.make()
    model(task.batch(0, 0)[0])
    buffers = dict(model.named_buffers())
    torch.testing.assert_close(dict(central.average().named_buffers()), buffers, **close)


class RowsOfABuffer(nn.Module):
    """Keeps running statistics in one buffer, or forgets them."""

    statistics: Tensor

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.stack([torch.zeros(9), torch.ones(9)]))
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the batch, and update the statistics."""
        mean, var = self.statistics if self.kept else torch.zeros(2, 9, dtype=x.dtype)
        return nn.functional.batch_norm(x, mean, var, training=True)


@pytest.mark.parametrize("kept", [True, False])
def test_statistics_that_a_kernel_cannot_update_in_place_run_in_a_loop(kept: bool) -> None:
    """A copy would be updated in their place, and the update would be lost."""
    task = Task(lambda: nn.Sequential(RowsOfABuffer(kept=kept), mlp()), tasks.vectors)
    models = tasks.train(task, parse("ring", 6), "atc", sgd, 4)
    with pytest.warns(UserWarning, match="running statistics are not buffers of each worker"):
        sim = run(make(task, order="atc"), task)
    for worker, model in enumerate(models):
        expected = model.state_dict()
        torch.testing.assert_close(sim.worker(worker).state_dict(), expected, rtol=0, atol=1e-12)


class Replaced(nn.Module):
    """A layer with a running mean that is replaced, after its old value has been used."""

    ema: Tensor

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 7)
        self.grows = grows
        self.register_buffer("ema", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the mean so far."""
        y = self.linear(x)
        scaled = y * self.ema
        self.ema = 0.9 * self.ema + 0.1 * y.detach().mean(0)
        if self.grows:
            self.ema = torch.cat([self.ema, self.ema])
        return scaled


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_buffers_that_a_forward_pass_replaces(gradients: str) -> None:
    """Each worker keeps its own new one; worker 0's is the centralized model's."""
    task = Task(Replaced, tasks.vectors)
    sim = run(make(task, gradients=gradients), task)
    models = tasks.train(task, parse("ring", 6), "awc", sgd, 4)
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    for worker, model in enumerate(models):
        torch.testing.assert_close(sim.worker(worker).state_dict(), model.state_dict(), **close)
    central = Centralized(task.make(), task.loss, sgd, 6, dtype=torch.float64, gradients=gradients)
    run(central, task, steps=1)
    model = task.make()
    model(task.batch(0, 0)[0])
    torch.testing.assert_close(central.average().get_buffer("ema"), model.ema, **close)
    task = Task(lambda: Replaced(grows=True), tasks.vectors)
    with pytest.raises(UserError, match=r"shapes of buffers, got \(14,\) for 'ema' of \(7,\)"):
        run(make(task, gradients=gradients), task, steps=1)


@pytest.mark.parametrize("gradients", ["vmap", "loop", "auto"])
@pytest.mark.parametrize("name", ["mlp", "lstm", "transformer"])
def test_centralized_is_one_batch(name: str, gradients: str) -> None:
    """Averaged gradients of W workers: one model on one batch of all samples."""
    task = ALL_TASKS[name]
    options: dict[str, Any] = {"dtype": torch.float64, "gradients": gradients}
    central = run(Centralized(task.make(), task.loss, sgd, 6, **options), task)
    model = task.make()
    optimizer = sgd(model.parameters())
    for step in range(4):
        inputs, targets = tasks.batches(task, 6, step)
        optimizer.zero_grad()
        task.loss(model(inputs.flatten(0, 1)), targets.flatten()).backward()
        optimizer.step()
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(central.average().state_dict(), model.state_dict(), **close)


class Sum(nn.Module):
    """Two parameters with one gradient, and one whose gradient is a number for all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(9)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Scale, and shift."""
        return x * (self.a + self.b) + self.c.sum()


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_centralized_gradients_that_share_memory(gradients: str) -> None:
    """What autograd returns as one tensor is added up once for each parameter."""

    def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, _ = tasks.vectors(worker, step)
        return inputs, inputs.flip(0)

    task = Task(Sum, batch, nn.functional.mse_loss)
    options: dict[str, Any] = {"dtype": torch.float64, "gradients": gradients}
    central = run(Centralized(task.make(), task.loss, sgd, 6, **options), task, steps=2)
    model = task.make()
    optimizer = sgd(model.parameters())
    for step in range(2):
        inputs, targets = tasks.batches(task, 6, step)
        optimizer.zero_grad()
        task.loss(model(inputs.flatten(0, 1)), targets.flatten(0, 1)).backward()
        optimizer.step()
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(central.average().state_dict(), model.state_dict(), **close)


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_centralized_normalizes_as_ddp_does(gradients: str) -> None:
    """Each worker by its own batch; running statistics are worker 0's."""
    options: dict[str, Any] = {"dtype": torch.float64, "gradients": gradients}
    central = run(Centralized(CONVNET.make(), CONVNET.loss, sgd, 6, **options), CONVNET)
    models = [CONVNET.make() for _ in range(6)]
    optimizers = [sgd(model.parameters()) for model in models]
    for step in range(4):
        for worker, model in enumerate(models):
            model.zero_grad()
            inputs, targets = CONVNET.batch(worker, step)
            CONVNET.loss(model(inputs), targets).backward()
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
            for p in same:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(central.average().state_dict(), models[0].state_dict(), **close)


def test_centralized_state_continues() -> None:
    """A loaded state continues bit for bit, and holds one copy of the parameters."""
    first, second = (Centralized(MLP.make(), MLP.loss, AdamW, 6, gradients="vmap") for _ in "ab")
    second.load_state_dict(copy.deepcopy(run(first).state_dict()))
    run(first)
    run(second)
    torch.testing.assert_close(first.parameters, second.parameters, rtol=0, atol=0)
    assert first.parameters["0.weight"].shape == (6, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "cta"}, "order must be one of awc, atc, got 'cta'"),
        ({"gossip_steps": 2}, "awc mixes once per step, got gossip_steps=2"),
        ({"order": "atc", "gossip_steps": 0}, "gossip_steps must be at least 1, got 0"),
        ({"buffers": "none"}, "buffers must be one of average, local, mix, got 'none'"),
        ({"gradients": "fast"}, "gradients must be one of auto, vmap, loop, got 'fast'"),
        ({"topology": ring(5)}, "on 6 workers, got one on 5"),
        ({"memory_gb": math.inf}, "memory_gb must be a finite number above 0, got inf"),
        ({"memory_gb": 1e-6}, "6 workers take .* GB, got 1e-06 GB; use fewer workers"),
        ({"optimizer": lambda p: SGD(MLP.make().parameters())}, "got 0 of them and 4 others"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "one gradient per step, got LBFGS"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(options: dict[str, Any], message: str) -> None:
    """The error has what was required, what was given, and what to do."""
    with pytest.raises(UserError, match=message):
        make(**options)


@pytest.mark.parametrize("kind", [Simulation, Centralized])
def test_a_frozen_model_is_refused(kind: Any) -> None:
    """With our error, not that of torch's optimizer."""
    with pytest.raises(UserError, match="must have trainable parameters, got none"):
        kind(MLP.make().requires_grad_(False), MLP.loss, sgd, 6)


def test_batches_must_have_a_row_per_worker() -> None:
    """A missing or wrong leading dimension is refused before anything is computed."""
    sim = make()
    inputs, targets = tasks.batches(MLP, 6, 0)
    with pytest.raises(
        UserError, match=r"inputs must be tensors with 6 workers .* got \(5, 3, 9\)"
    ):
        sim.step(inputs[:5], targets)
    with pytest.raises(UserError, match=r"targets must be tensors with 6 workers .* got int"):
        sim.step(inputs, 3)
    with pytest.raises(UserError, match=r"worker must be in 0\.\.5, got 6"):
        sim.worker(6)
    with pytest.raises(UserError, match="must return a scalar"):
        Simulation(MLP.make(), lambda output, _: output, sgd, 6).step(inputs, targets)


def test_nothing_warns_at_any_topology() -> None:
    """A sparse product of torch warns that it is new; users need not know.

    Torch would warn once per process, which may have been before: here it does so each time.
    """
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="Sparse CSR tensor support is in beta"):
            torch.eye(2).to_sparse_csr()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mix_(torch.ones(128, 2), parse("hypercube", 128).round(0))
    finally:
        torch.set_warn_always(before)
