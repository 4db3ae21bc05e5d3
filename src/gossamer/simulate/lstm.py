"""An LSTM layer for all workers at once, with a custom backward pass."""

# W: workers, T: time, B: batch, I: input features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gossamer.simulate.stacked import Dims, all_in_front, as_rows, product, weight_gradient


def lstm_of_all(num_workers: int, dims: Dims, into: Any, *tensors: Tensor) -> Any:
    """Return every worker's h at all times, last h and last c, of one layer and direction."""
    if any(dim is not None for dim in dims[4:]):
        return _stacked_lstm(into, *all_in_front(num_workers, dims[1:], *tensors))
    # One model for all workers: they are more of the batch.
    x, h, c = all_in_front(num_workers, dims[1:4], *tensors[:3])
    folded = (x.transpose(0, 1).flatten(1, 2), h.flatten(0, 1), c.flatten(0, 1), *tensors[3:])
    hs, h, c = _stacked_lstm(into, *(tensor.unsqueeze(0) for tensor in folded))
    h, c = (state.view(num_workers, -1, state.shape[-1]) for state in (h, c))
    return hs[0].unflatten(1, (num_workers, -1)).transpose(0, 1), h, c


def _stacked_lstm(
    into: Any, x: Tensor, h: Tensor, c: Tensor, w_input: Tensor, w_hidden: Tensor, *biases: Tensor
) -> Any:
    bias = sum(biases) if biases else None
    return StackedLstm.apply(x, h, c, w_input, w_hidden, bias, (into(w_input), into(w_hidden)))


class StackedLstm(Function):
    """One layer and direction of an LSTM for all workers.

        a_t = x_t Wxᵀ + h_{t-1} Whᵀ + b         in four parts: ai, af, ag, ao
        i, f, o = σ(ai), σ(af), σ(ao)           g = tanh(ag)
        c_t = f c_{t-1} + i g                   h_t = o tanh(c_t)

    and backwards in time, with ∂h and ∂c what comes from t + 1 and from outside:

        ∂c += ∂h o (1 - tanh²(c_t))             ∂ao = ∂h tanh(c_t) o (1 - o)
        ∂ai = ∂c g i (1 - i)                    ∂af = ∂c c_{t-1} f (1 - f)
        ∂ag = ∂c i (1 - g²)                     ∂c_{t-1} = ∂c f,  ∂h_{t-1} = ∂a_t Wh
        ∂Wx = Σ_t ∂a_tᵀ x_t                     ∂Wh = Σ_t ∂a_tᵀ h_{t-1}

    A custom backward pass, because autograd would accumulate the weight's gradient at every time
    step, where one product over all of them is enough.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x_WTBI: Tensor,
        h: Tensor,
        c: Tensor,
        w_input: Tensor,
        w_hidden: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return h at all times, the last h and the last c."""
        bias, ctx.into = rest
        gates = product(x_WTBI, w_input, bias).view(*x_WTBI.shape[:-1], -1)
        hs, cs, tanhs = (gates.new_empty(*gates.shape[:-1], h.shape[-1]) for _ in range(3))
        ctx.save_for_backward(x_WTBI, h, c, w_input, w_hidden, gates, hs, cs, tanhs)
        transposed = w_hidden.mT
        for t in range(gates.shape[1]):
            i, f, g, o = gates[:, t].baddbmm_(h, transposed).chunk(4, -1)
            for gate in (i, f, o):
                gate.sigmoid_()
            c = torch.mul(f, c, out=cs[:, t]).addcmul_(i, g.tanh_())
            h = torch.mul(o, torch.tanh(c, out=tanhs[:, t]), out=hs[:, t])
        return hs, h.clone(), c.clone()

    @staticmethod
    def backward(ctx: Any, grad_hs: Tensor, grad_h: Tensor, grad_c: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of those inputs that need one; states are cheap."""
        x, h, c, w_input, w_hidden, gates, hs, cs, tanhs = ctx.saved_tensors
        grad_gates = torch.empty_like(gates)
        for t in reversed(range(gates.shape[1])):
            i, f, g, o = gates[:, t].chunk(4, -1)
            to_i, to_f, to_g, to_o = grad_gates[:, t].chunk(4, -1)
            grad_h = grad_h + grad_hs[:, t]
            grad_c = grad_c + _tanh_backward(grad_h * o, tanhs[:, t])
            _sigmoid_backward(grad_h * tanhs[:, t], o, grad_input=to_o)
            _sigmoid_backward(grad_c * g, i, grad_input=to_i)
            _sigmoid_backward(grad_c * (cs[:, t - 1] if t else c), f, grad_input=to_f)
            _tanh_backward(grad_c * i, g, grad_input=to_g)
            grad_c = grad_c * f
            grad_h = torch.bmm(grad_gates[:, t], w_hidden)
        into_input, into_hidden = ctx.into
        needs_x, _, _, needs_input, needs_hidden, needs_bias, _ = ctx.needs_input_grad
        rows, before = as_rows(grad_gates), torch.cat([h.unsqueeze(1), hs[:, :-1]], 1)
        return (
            torch.bmm(rows, w_input).view_as(x) if needs_x else None,
            grad_h,
            grad_c,
            weight_gradient(rows, as_rows(x), into_input) if needs_input else None,
            weight_gradient(rows, as_rows(before), into_hidden) if needs_hidden else None,
            rows.sum(1) if needs_bias else None,
            None,
        )


_sigmoid_backward: Any = torch.ops.aten.sigmoid_backward
_tanh_backward: Any = torch.ops.aten.tanh_backward
