"""A pass through our own layer loop over vLLM's modules: one in which attention is looked at, or keys are hidden."""

from collections.abc import Mapping, Sequence

import torch

from chunkweave.fusion.attention_capture import AttentionCapture
from chunkweave.fusion.capture import PartCapture
from chunkweave.fusion.loop import PassRun
from chunkweave.fusion.rows import ActiveRows, counted
from chunkweave.planning.plan import Pass, Plan
from chunkweave.types import Span
from chunkweave.vllm.layer_modules import LayerModules
from chunkweave.vllm.paged_cache import PagedCache


class LoopPass:
    """Runs the active tokens of one request, in blocks or not, by the code of the project's own engine.

    Its question has no answer here: vLLM computes it again, over what was woven. Owned by its weave.
    """

    def __init__(
        self,
        modules: LayerModules,
        cache: PagedCache,
        plan: Plan,
        a_pass: Pass,
        token_ids: torch.Tensor,
        *,
        captures: Sequence[PartCapture] = (),
        attention: AttentionCapture | None = None,
        evidence: torch.Tensor | None = None,
        recomputed: Sequence[Span] = (),
        decided: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """`token_ids` `[tokens]` is the whole prompt, on the device; `captures` take the KV of parts to be stored.

        `a_pass` is a pass of `plan`, or what is to be done of it. For the rest see `ActiveRows`.
        """
        self._plan = plan
        self._fixed = plan.computed_tokens_of(a_pass)
        self._rows = ActiveRows.of_pass(
            cache,
            token_ids,
            a_pass,
            dtype=modules.dtype,
            evidence=evidence,
            recomputed=recomputed,
            answers=False,
            decided=decided,
            ranks=modules.ranks,
        )
        self.started = self._rows.candidates
        if captures:
            self._rows.keep(captures, attention)
        self._run = PassRun(modules, [self._rows], attention=modules.attention)

    @property
    def layer(self) -> int:
        """How many layers were run."""
        return self._run.layer

    @property
    def done(self) -> bool:
        return self._run.done

    @property
    def active_tokens(self) -> int:
        """Tokens that enter the next layer."""
        return len(self._rows.positions)

    def next_layer(self) -> None:
        """Run one more layer; there must be one."""
        self._run.next_layer()

    @property
    def evidence(self) -> torch.Tensor | None:
        """What its question looked at, `[positions]`, if it was watched."""
        return self._rows.evidence

    @property
    def kept(self) -> Mapping[int, torch.Tensor]:
        """Positions of the candidates that each layer's rule kept."""
        return self._rows.kept

    @property
    def recomputed(self) -> list[int]:
        """Positions of reused chunks that are active now, ascending."""
        return self._plan.reused_among(self._rows.where)

    @property
    def recompute_work(self) -> int:
        """Reused-chunk tokens that were active, summed over the layers done."""
        return sum(layer.kept_tokens - self._fixed for layer in counted(self._rows.work))
