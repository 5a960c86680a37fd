"""megatron-core's plan of the passes of a micro-batch in parts, which its schedule runs beside those of another one.

`GPTModel` has such a plan, `HybridModel` (0.19.2) does not: what both do before and after the layers is here in the two
methods that megatron-core's plan calls (`models/common/utils.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.multi_token_prediction import process_mtp_loss


class ScheduledModel(HybridModel):
    """A model whose passes can be run in parts (`layout.overlap_moe_expert_parallel_comm`), in training."""

    def build_schedule_plan(self, *args: Any, **kwargs: Any) -> TransformerModelChunkSchedulePlan:
        """The passes of a micro-batch in parts; arguments as `forward`."""
        return TransformerModelChunkSchedulePlan(self, *args, **kwargs)

    def _preprocess(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        decoder_input: torch.Tensor | None,
        packed_seq_params: Any,
        padding_mask: None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        """What the layers read: their input [s, b, h], unless another stage sends it, and rotary angles. The others are
        of generation and of padded micro-batches."""
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        angles = None
        if (rotary := getattr(self, "rotary_pos_emb", None)) is not None:
            length = rotary.get_rotary_seq_len(None, self.decoder, decoder_input, self.config, packed_seq_params)
            angles = rotary(length, packed_seq=packed_seq_params is not None)
            if self.position_embedding_type == "yarn":
                angles, _factor = angles
        return decoder_input, angles, None, None, None, None

    def _postprocess(
        self,
        *,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor,
        packed_seq_params: Any,
        **_unused: Any,
    ) -> torch.Tensor:
        """Losses [b, s] of the last stage from the output of the layers [s, b, h], those of multi-token prediction
        behind it."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.config.mtp_num_layers:
            hidden_states = process_mtp_loss(
                hidden_states=hidden_states,
                labels=labels,
                loss_mask=loss_mask,
                output_layer=self.output_layer,
                output_weight=weight,
                runtime_gather_output=None,
                is_training=self.training,
                compute_language_model_loss=self.compute_language_model_loss,
                config=self.config,
                cp_group=self.pg_collection.cp,
                tp_group=self.tp_group,
                packed_seq_params=packed_seq_params,
                scale_logits_fn=self._scale_logits if self.config.use_mup else None,
                input_ids=input_ids,
            )
        logits, _bias = self.output_layer(hidden_states, weight=weight)
        losses: torch.Tensor = self.compute_language_model_loss(labels, self._scale_logits(logits))
        return losses
