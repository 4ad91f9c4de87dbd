"""rollout: prompts in, token sequences with log-probabilities out.

The tour, in the order of a request. `llm.py` tokenises and drives; `engine.py` has the loop, `step`: `scheduler.py`
decides which tokens are computed and gives them blocks (`blocks.py`: reference counts, prefix cache), `runner.py`
packs them, runs the unmodified Hugging Face module on the paged cache (`attention.py` is its entry in transformers'
attention interface) and samples; what is finished becomes a `Completion` (`outputs.py`). Running sequences are arrays
(`slots.py`), waiting ones are records (`sequence.py`). `sampling_params.py` is how a request is drawn, `sampling.py`
where its random numbers come from, `weights.py` how new weights arrive while requests run.

The kernels are operators of `rlneuron.device.ops` (paged_attention, sampling), each with a plain-PyTorch form. This
room knows nothing of rewards, training or Ray.
"""

from __future__ import annotations

from rlneuron.rollout.engine import Engine, EngineConfig
from rlneuron.rollout.llm import LLM, find_eos_token_ids
from rlneuron.rollout.outputs import Completion, EngineStats, FinishReason, RequestOutput
from rlneuron.rollout.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "find_eos_token_ids",
]
