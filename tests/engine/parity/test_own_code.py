"""An architecture that transformers does not have, with code in its directory: from nothing to an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.command import Command
from support.runs import VOCABULARY, make_run, records

#: Pre-norm blocks in the manner of older code: layers under a name of their own that return tuples, learned
#: positions, a gate of its own, and a buffer that belongs to the weights.
CONFIGURATION = """
from transformers import PreTrainedConfig

class ReedConfig(PreTrainedConfig):
    model_type = "reed"

    def __init__(self, vocab_size=64, width=32, depth=2, mixers=2, positions=64, leaks=False, **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, width, depth
        self.mixers, self.max_position_embeddings, self.leaks = mixers, positions, leaks
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
"""
MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from .configuration_reed import ReedConfig

class ReedBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.norm = nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixers = config.mixers
        self.register_buffer("scale", torch.ones(width))

    def forward(self, hidden, mask):
        q, k, v = self.mix(self.norm(hidden)).chunk(3, -1)
        heads = [x.unflatten(-1, (self.mixers, -1)).transpose(1, 2) for x in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask[:, None])
        return hidden + torch.tanh(self.out(mixed.transpose(1, 2).flatten(2)) * self.scale), None

class ReedPreTrained(PreTrainedModel):
    config_class = ReedConfig
    base_model_prefix = "reed"
    _supports_sdpa = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        if isinstance(module, ReedBlock):
            nn.init.ones_(module.scale)

class ReedModel(ReedPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(ReedBlock(config) for _ in range(config.num_hidden_layers))
        self.last = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids, position_ids=None, use_cache=False, **kwargs):
        at = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        positions = at if position_ids is None else position_ids
        mask = at[:, :, None] >= at[:, None, :]
        if not self.config.leaks:
            document = at - positions
            mask = mask & (document[:, :, None] == document[:, None, :])
        hidden = self.tokens(input_ids) + self.places(positions)
        for block in self.blocks:
            hidden, _ = block(hidden, mask)
        return BaseModelOutput(last_hidden_state=self.last(hidden))

class ReedForCausalLM(ReedPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.reed = ReedModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, position_ids=None, use_cache=False, **kwargs):
        hidden = self.reed(input_ids, position_ids, use_cache, **kwargs).last_hidden_state
        return CausalLMOutput(logits=self.head(hidden))
"""


def write_reed(directory: Path, **settings: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "configuration_reed.py").write_text(CONFIGURATION)
    (directory / "modeling_reed.py").write_text(MODELING)
    names = {
        "AutoConfig": "configuration_reed.ReedConfig",
        "AutoModelForCausalLM": "modeling_reed.ReedForCausalLM",
    }
    described = {"model_type": "reed", "auto_map": names, "vocab_size": VOCABULARY, **settings}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers copies code that it imports; not into the home of whoever runs the tests."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_trains_and_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tierstream, reed = Command(capsys, tmp_path), write_reed(tmp_path / "reed")
    said = ["does not have this architecture", "configuration_reed.py", "trust_remote_code to true"]
    tierstream.refused("check-model", str(reed), said=said)
    status, out, err = tierstream.run("check-model", str(reed), "--trust-remote-code", "true")
    assert (status, err, out.splitlines()[-1]) == (0, "", "trains")
    config = make_run(tmp_path, steps=2)
    config.model.config, config.checkpoint.every_steps = str(reed), 2
    tierstream.refused_train(config, said)
    config.model.trust_remote_code = True
    status, out, _ = tierstream.train(config)
    assert (status, len(records(config))) == (0, 2)
    exported = tmp_path / "exported"
    assert tierstream.run("export", config.run_dir, str(exported))[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    with torch.no_grad():
        logits = model(torch.arange(3, 9)[None]).logits
    assert logits.shape == (1, 6, VOCABULARY)
    assert bool(logits.isfinite().all())


def test_one_that_mixes_documents_trains_with_one_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tierstream, reed = Command(capsys, tmp_path), write_reed(tmp_path / "reed", leaks=True)
    status, out, _ = tierstream.run("check-model", str(reed), "--trust-remote-code", "true")
    assert (status, out.splitlines()[-1]) == (0, "trains with one document a row (data.packing: none)")
    config = make_run(tmp_path, steps=1)
    config.model.config, config.model.trust_remote_code = str(reed), True
    tierstream.refused_train(config, ["data.packing", "ReedForCausalLM does not keep documents of a row"])
    config.data.packing = "none"
    assert tierstream.train(config)[0] == 0
