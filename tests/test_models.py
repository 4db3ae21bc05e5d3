"""Our own architectures: of the published sizes, and fit for the simulator."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gossamer import Simulation, workloads
from gossamer.workloads.models.convnet import small_convnet
from gossamer.workloads.models.densenet import densenet100
from gossamer.workloads.models.lstm import WordLSTM
from gossamer.workloads.models.resnet import resnet20, resnet50, small_resnet
from gossamer.workloads.models.transformer import GPT, Translator

WORKERS, BATCH = 2, 2


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("cifar10-resnet20", 269_722),  # 0.27 M
        ("cifar10-densenet100", 769_162),  # 0.77 M
        ("imagenet-resnet50", 25_557_032),  # 25.6 M
        ("cifar10-resnet8", 19_218),
        ("cifar10-resnet8(width=16, pixels=16)", 75_290),
        ("fashion-mnist-cnn(width=4)", 13_254),
        ("digits-mlp", 9_610),
        ("digits-cnn", 6_138),
        ("fashion-mnist-cnn", 206_970),
        ("stdlib-gpt", 120_576),
        ("shakespeare-gpt", 834_304),
        ("wikitext2-lstm", 7_332_078),
        ("wikitext2-lstm(width=16)", 570_078),
        ("multi30k-transformer", 8_058_880),
    ],
)
def test_models_have_the_parameters_they_are_said_to_have(name: str, count: int) -> None:
    """The first three are the published counts; docstrings and docs name the others."""
    model = workloads.find(name).make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_resnets_are_as_deep_as_their_names_say() -> None:
    """Layers with weights on the longest path: convolutions without projections, and the last."""
    for model, depth in ((small_resnet(1, 8), 8), (resnet20(), 20), (resnet50(), 50)):
        names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear) and "shortcut" not in name
        ]
        assert len(names) == depth


def test_a_shortcut_without_parameters_is_every_second_pixel_and_zeros() -> None:
    """Where the body adds nothing, a block that halves the image passes half of its channels."""
    block = resnet20().get_submodule("6")
    nn.init.zeros_(block.get_parameter("body.4.weight"))
    x = torch.rand(2, 16, 8, 8)
    y = block.eval()(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (small_convnet, lambda: torch.randn(WORKERS, BATCH, 1, 28, 28)),
        (resnet20, lambda: torch.randn(WORKERS, BATCH, 3, 8, 8)),
        (densenet100, lambda: torch.randn(WORKERS, BATCH, 3, 8, 8)),
        (lambda: WordLSTM(50, 8), lambda: torch.randint(50, (WORKERS, BATCH, 5))),
        (
            lambda: GPT(50, 8, width=16, layers=2, heads=2),
            lambda: torch.randint(50, (WORKERS, BATCH, 8)),
        ),
        (
            lambda: Translator(50, 8, width=16, layers=1, heads=2, dropout=0.1),
            lambda: torch.randint(1, 50, (WORKERS, BATCH, 16)),
        ),
    ],
    ids=["convnet", "resnet20", "densenet100", "lstm", "gpt", "translator"],
)
def test_models_run_for_many_workers_at_once(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor]
) -> None:
    """Under vmap a step is that of one worker after the other, with no fallback."""
    torch.manual_seed(0)
    model, x_W = make().double(), inputs()
    x_W = x_W.double() if x_W.is_floating_point() else x_W
    targets_W = torch.zeros(WORKERS, BATCH, dtype=torch.long)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:  # of a sequence, of its last word
        outputs = outputs[:, -1] if outputs.dim() == 3 else outputs
        return nn.functional.cross_entropy(outputs, targets)

    together, one_by_one = (
        Simulation(model, loss, lambda p: SGD(p, lr=0.05), WORKERS, "ring", gradients=how)
        for how in ("vmap", "loop")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = together.step(x_W, targets_W)
    torch.testing.assert_close(losses, one_by_one.step(x_W, targets_W))
    for name, parameter in together.parameters.items():
        torch.testing.assert_close(parameter, one_by_one.parameters[name])


def test_a_translation_does_not_depend_on_padding() -> None:
    """What is after a source's end changes no output."""
    torch.manual_seed(0)
    model = Translator(50, 8, width=16, layers=2, heads=2, dropout=0.0).eval()
    source = torch.tensor([[5, 6, 3, 0, 0, 0, 0, 0]])
    memory, mask = model.encode(source)
    alone, own_mask = model.encode(source[:, :3])
    target = torch.tensor([[2, 7, 8]])
    torch.testing.assert_close(
        model.decode(target, memory, mask), model.decode(target, alone, own_mask)
    )


def test_greedy_translation_takes_the_most_likely_token_every_time() -> None:
    """Token by token it is what the whole decoder says of the sequence so far."""
    torch.manual_seed(0)
    model = Translator(50, 8, width=16, layers=2, heads=2, dropout=0.5).double().eval()
    nn.init.normal_(model.target.weight)
    source = torch.tensor([[5, 6, 7, 3, 0, 0, 0, 0], [9, 3, 0, 0, 0, 0, 0, 0]])
    expected = torch.full((2, 1), 2)
    for _ in range(7):
        logits = model(torch.cat((source, expected), 1))
        expected = torch.cat((expected, logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(model.translate(source, begin=2, end=50), expected[:, 1:])
    first = int(expected[0, 1])
    assert model.translate(source[:1], begin=2, end=first).tolist() == [[first]]
