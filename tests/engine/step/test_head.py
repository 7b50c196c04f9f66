"""The head with a loss kernel that works in place, against the plain one.

Bounds, of the relative difference in norm: fp32 1e-5. In bf16 both round d loss / d logits to 8 bits, but
from sums in another order, and the plain head rounds the matrix's gradient once more: 2 ** -7.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.allocations import peak_bytes
from support.loss_kernel import torch_cross_entropy_
from support.rig import reference_model, tiny_config

from tierstream.engine.model.binding import Binding
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.kernels import liger_cross_entropy_
from tierstream.engine.step.head import IGNORED, Head, LossKernel, logits_nbytes

ROWS, SEQ_LEN, VOCABULARY, HIDDEN = 3, 50, 1003, 48
#: What lies in the sums before; as large as a gradient, so that no bits are lost in it.
THERE = 2**-12
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
Result = dict[str, torch.Tensor]


def run_head(
    kernel: LossKernel | None,
    dtype: torch.dtype,
    *,
    tied: bool,
    chunk: int = 64,
    device: str = "cpu",
    sums_dtype: torch.dtype = torch.float32,
    z_coef: float = 0.0,
    without: str = "",
) -> Result:
    """Loss, gradient of the hidden states, and gradients of the unit's tensors, which are added
    to something; but that of `without`, which is not wanted.
    """
    config = tiny_config("qwen2", tied=tied, vocab_size=VOCABULARY, hidden_size=HIDDEN, layers=1)
    model = reference_model(config, dtype).to(device)
    norm, output, units = model.model.norm, model.lm_head, find_units(model)
    if kernel is not None:
        output.loss_kernel = kernel
    head = Head(norm, output, Binding(model, [norm, output], units.head), chunk, z_coef)
    parameters = dict(model.named_parameters())
    weights = [parameters[tensor.name].detach() for tensor in units.head.tensors]
    names = [tensor.name for tensor in units.head.tensors]
    gradients = [
        None if tensor.name == without else torch.full(tensor.shape, THERE, dtype=sums_dtype, device=device)
        for tensor in units.head.tensors
    ]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, SEQ_LEN, HIDDEN, generator=generator).to(device, dtype)
    labels = torch.randint(VOCABULARY, (ROWS, SEQ_LEN), generator=generator)
    labels[:, ::5] = -100
    trained = int((labels != -100).sum())
    with torch.no_grad():
        losses, grad = head.loss_and_gradient(
            weights, hidden, labels.to(device), trained, gradients, of_hidden=without != "hidden"
        )
    assert (losses.dtype, losses.shape) == (torch.float64, (2,))
    found = {"hidden": grad} | {
        n: g if g is None else g - THERE for n, g in zip(names, gradients, strict=True)
    }
    assert [name for name, value in found.items() if value is None] == ([without] if without else [])
    made = {name: value for name, value in found.items() if value is not None}
    assert "hidden" not in made or (made["hidden"].dtype, made["hidden"].shape) == (dtype, hidden.shape)
    return {"loss": losses[0], "z_loss": losses[1], **made}


def check_close(ours: Result, theirs: Result, bound: float) -> None:
    for name in ("loss", "z_loss"):
        assert ours[name].item() == pytest.approx(theirs[name].item(), rel=1e-5)
    for name, expected in theirs.items():
        difference = (ours[name].double() - expected.double()).norm()
        assert difference <= bound * expected.double().norm(), name


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("z_coef", [0.0, 0.3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_loss_kernel_gives_the_plain_gradients(dtype: torch.dtype, tied: bool, z_coef: float) -> None:
    plain = run_head(None, dtype, tied=tied, z_coef=z_coef)
    check_close(run_head(torch_cross_entropy_, dtype, tied=tied, z_coef=z_coef), plain, BOUNDS[dtype])
    assert (plain["z_loss"] > 0) == (z_coef > 0)


@pytest.mark.parametrize("without", ["hidden", "lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("kernel", [None, torch_cross_entropy_], ids=["plain", "kernel"])
def test_a_gradient_that_is_not_wanted_changes_no_other(kernel: LossKernel | None, without: str) -> None:
    expected = run_head(kernel, torch.bfloat16, tied=False)
    del expected[without]
    found = run_head(kernel, torch.bfloat16, tied=False, without=without)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_z_loss_leaves_the_cross_entropy_as_it_is() -> None:
    without, added = (run_head(None, torch.bfloat16, tied=True, z_coef=z) for z in (0.0, 1e-3))
    assert torch.equal(without["loss"], added["loss"])
    assert not torch.equal(without["hidden"], added["hidden"])


@pytest.mark.parametrize("kernel", [None, torch_cross_entropy_], ids=["plain", "kernel"])
def test_chunks_change_only_the_order_of_sums(kernel: LossKernel | None) -> None:
    whole = run_head(kernel, torch.float32, tied=False, chunk=10_000)
    for chunk in (1, 7, 149):
        check_close(run_head(kernel, torch.float32, tied=False, chunk=chunk), whole, 1e-5)


def test_sums_in_the_weights_type_are_added_to() -> None:
    """As the resident baseline has them; each of three chunks rounds to 8 bits."""
    expected = run_head(torch_cross_entropy_, torch.float32, tied=False)
    found = run_head(torch_cross_entropy_, torch.bfloat16, tied=False, sums_dtype=torch.bfloat16)
    check_close(found, expected, 2**-6)


@pytest.mark.parametrize("z_coef", [0.0, 0.3])
def test_logits_of_one_chunk_exist_at_once(z_coef: float) -> None:
    """C17: a vocabulary of 250,000. The peak is what the plan counts for a chunk, whatever the length; the
    first chunk has no trained token; loss and gradients are those of plain torch.
    """
    tokens, chunk = 160, 32
    config = tiny_config("qwen2", vocab_size=250_000, layers=1)
    model = reference_model(config, torch.float32)
    norm, output, units = model.model.norm, model.lm_head, find_units(model)
    head = Head(norm, output, Binding(model, [norm, output], units.head), chunk, z_coef)
    parameters = dict(model.named_parameters())
    used = [parameters[tensor.name] for tensor in units.head.tensors]
    weights = [parameter.detach() for parameter in used]
    gradients = [torch.zeros_like(weight) for weight in weights]
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, tokens, config.hidden_size, generator=generator)
    labels = torch.randint(config.vocab_size, (1, tokens), generator=generator)
    labels[:, :chunk] = IGNORED
    with torch.no_grad():
        made = list[tuple[torch.Tensor, torch.Tensor]]()
        peak = peak_bytes(  # of the process's memory, the heap would hide what it has left from before
            lambda: made.append(head.loss_and_gradient(weights, hidden, labels, tokens - chunk, gradients))
        )
    ((losses, grad),) = made
    planned = logits_nbytes(output, chunk, z_coef)
    assert planned <= peak < 1.01 * planned, (peak, planned)  # all logits are five times as much
    hidden.requires_grad_()
    logits = output(norm(hidden[:, chunk:]))[0]
    entropy = torch.nn.functional.cross_entropy(logits, labels[0, chunk:])
    z_loss = logits.logsumexp(-1).square().mean()
    expected = torch.autograd.grad(entropy + z_coef * z_loss, [hidden, *used])
    assert losses[0].item() == pytest.approx(entropy.item(), rel=1e-6)
    for found, right in zip((grad, *gradients), expected, strict=True):
        assert (found - right).norm() <= 1e-6 * right.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("z_coef", [0.0, 0.3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_ligers_kernel_gives_the_plain_gradients(
    dtype: torch.dtype, tied: bool, z_coef: float, deterministic: None
) -> None:
    pytest.importorskip("liger_kernel")

    def run(kernel: LossKernel | None) -> Result:
        return run_head(kernel, dtype, tied=tied, device="cuda", z_coef=z_coef)

    fused, again = run(liger_cross_entropy_), run(liger_cross_entropy_)
    check_close(fused, run(None), BOUNDS[dtype])
    assert all(torch.equal(fused[name], again[name]) for name in fused)


@pytest.mark.gpu
def test_ligers_kernel_needs_the_logits_alone() -> None:
    """16-bit logits, against three values of 32 bits of the plain head."""
    pytest.importorskip("liger_kernel")
    tokens, vocabulary, hidden = 2048, 64_000, 64
    config = tiny_config("qwen2", vocab_size=vocabulary, hidden_size=hidden, layers=1)
    model = reference_model(config, torch.bfloat16).to("cuda")
    norm, output, units = model.model.norm, model.lm_head, find_units(model)
    parameters = dict(model.named_parameters())
    weights = [parameters[tensor.name].detach() for tensor in units.head.tensors]
    gradients = [torch.zeros(tensor.shape, device="cuda") for tensor in units.head.tensors]
    states = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (1, tokens), device="cuda")
    per_logit = []
    for kernel in (None, liger_cross_entropy_):
        output.loss_kernel = kernel
        head = Head(norm, output, Binding(model, [norm, output], units.head), tokens)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            head.loss_and_gradient(weights, states, labels, tokens, gradients)
        per_logit.append((torch.cuda.max_memory_allocated() - before) / (tokens * vocabulary))
        assert per_logit[-1] < logits_nbytes(output, 1, 0.0) / vocabulary + 1
    assert per_logit[1] < 2.5
    assert per_logit[0] < 13
