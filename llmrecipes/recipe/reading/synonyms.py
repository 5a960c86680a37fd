"""Names of a recipe's keys in other frameworks: Hugging Face, Megatron-LM, GPT-NeoX, torchtitan and nanotron.

Only for hints: a recipe accepts none of these names. Names that a recipe also has, in another section, are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

SAME: dict[str, str] = {
    "model.num_layers": "num_hidden_layers n_layer n_layers num_decoder_layers num_transformer_layers",
    "model.hidden_size": "n_embd n_embed d_model dim model_dim embed_dim",
    "model.num_attention_heads": "n_head n_heads num_heads num_q_heads",
    "model.num_query_groups": "num_key_value_heads num_kv_heads n_kv_heads n_head_kv multi_query_group_num multi_query",
    "model.kv_channels": "head_dim d_head d_kv attention_head_dim",
    "model.ffn_hidden_size": "intermediate_size n_inner ffn_dim d_ff ffn_hidden_dim mlp_hidden_size mlp_dim",
    "model.max_position_embeddings": "n_positions n_ctx max_positions model_max_length max_sequence_length",
    "model.seq_length": "seq_len sequence_length block_size context_length max_seq_len max_seq_length max_length "
    "sequence_len cutoff_len",
    "model.vocab_size": "n_vocab padded_vocab_size vocabulary_size",
    "model.layernorm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon rms_norm_epsilon layernorm_eps norm_eps "
    "norm_epsilon",
    "model.normalization": "norm norm_type",
    "model.activation_func": "hidden_act hidden_activation activation_function activation act_fn swiglu squared_relu",
    "model.gated_linear_unit": "swiglu",
    "model.rotary_base": "rope_theta rope_base rotary_emb_base rope_parameters rope_parameters.rope_theta",
    "model.rotary_percent": "partial_rotary_factor rotary_pct rotary_dim",
    "model.rope_scaling": "use_rope_scaling rope_scaling.type rope_scaling.rope_type rope_scaling.low_freq_factor "
    "rope_scaling.high_freq_factor rope_scaling.original_max_position_embeddings",
    "model.rope_scaling_factor": "rope_scaling.factor",
    "model.rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "model.yarn_beta_fast": "rope_scaling.beta_fast",
    "model.yarn_beta_slow": "rope_scaling.beta_slow",
    "model.yarn_mscale": "rope_scaling.mscale rope_scaling.attention_factor attention_factor",
    "model.yarn_mscale_all_dim": "rope_scaling.mscale_all_dim",
    "model.yarn_correction_range_round_to_int": "rope_scaling.truncate",
    "model.position_embedding_type": "pos_emb use_rotary_position_embeddings rotary",
    "model.share_embeddings_and_output_weights": "tie_word_embeddings tie_embeddings weight_tying no_weight_tying "
    "untie_embeddings_and_output_weights",
    "model.add_qkv_bias": "attention_bias qkv_bias",
    "model.add_bias_linear": "mlp_bias bias use_bias disable_bias_linear",
    "model.qk_layernorm": "qk_norm use_qk_norm",
    "model.attention_dropout": "attn_pdrop attn_dropout attention_probs_dropout_prob",
    "model.layer_drop": "layerdrop drop_path_rate stochastic_depth",
    "model.hidden_dropout": "resid_pdrop embd_pdrop dropout hidden_dropout_prob resid_dropout embd_dropout",
    "model.init_method_std": "initializer_range init_std",
    "model.use_mup": "mup mu_p use_mu_p",
    "model.mup_base_hidden_size": "mup_base_width base_width mup_width d_model_base dim_model_base",
    "model.mup_embedding_mult": "scale_emb emb_scale embedding_multiplier mup_input_alpha",
    "model.mup_output_mult": "logit_scale mup_output_alpha",
    "model.num_moe_experts": "num_local_experts num_experts n_routed_experts moe_num_experts n_experts",
    "model.moe_router_topk": "num_experts_per_tok num_experts_per_token moe_top_k moe_topk top_k",
    "model.moe_ffn_hidden_size": "moe_intermediate_size expert_intermediate_size",
    "model.moe_shared_expert_intermediate_size": "shared_expert_intermediate_size n_shared_experts num_shared_experts",
    "model.moe_layer_freq": "first_k_dense_replace decoder_sparse_step mlp_only_layers",
    "model.moe_router_load_balancing_type": "seq_aux",
    "model.moe_aux_loss_coeff": "router_aux_loss_coef aux_loss_alpha aux_loss_coef",
    "model.moe_z_loss_coeff": "router_z_loss_coef z_loss_coef",
    "model.moe_router_enable_expert_bias": "topk_method",
    "model.moe_router_bias_update_rate": "bias_update_speed",
    "model.moe_router_score_function": "scoring_func",
    "model.moe_router_pre_softmax": "norm_topk_prob",
    "model.moe_router_topk_scaling_factor": "routed_scaling_factor",
    "model.moe_router_num_groups": "n_group num_expert_group",
    "model.moe_router_group_topk": "topk_group",
    "model.moe_input_jitter_eps": "router_jitter_noise input_jitter_noise",
    "model.moe_expert_capacity_factor": "capacity_factor expert_capacity moe_capacity_factor",
    "model.qk_head_dim": "qk_nope_head_dim",
    "model.qk_pos_emb_head_dim": "qk_rope_head_dim",
    "model.mtp_num_layers": "num_nextn_predict_layers",
    "layout.tensor_model_parallel_size": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "model_parallel_size",
    "layout.pipeline_model_parallel_size": "pp pp_size pipeline_parallel pipeline_parallel_size "
    "pipeline_parallel_degree pipe_parallel_size",
    "layout.virtual_pipeline_model_parallel_size": "vpp virtual_pipeline_parallel_size "
    "num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage",
    "layout.context_parallel_size": "cp cp_size context_parallel context_parallel_degree",
    "layout.expert_model_parallel_size": "ep ep_size expert_parallel_size expert_parallel_degree",
    "layout.expert_tensor_parallel_size": "etp expert_tensor_parallel_degree",
    "layout.sequence_parallel": "sp enable_sequence_parallel",
    "lora.rank": "lora_r lora_rank lora_dim adapter finetuning_type",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target_modules lora_target lora_target_linear",
    "dpo.beta": "rl_beta pref_beta dpo_beta",
    "dpo.loss_type": "pref_loss",
    "data.sources": "datasets",
    "data.split": "val_set_size val_size",
    "data.chat.packing": "sample_packing",
    "data.chat.messages_key": "field_messages",
    "train.pretrained": "base_model model_name_or_path pretrained_model_name_or_path",
    "layout.num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "layout.num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "train.grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32 accumulate_grad_in_fp32",
    "layout.zero.stage": "zero_stage zero_optimization",
    "layout.zero.offload_optimizer": "cpu_offload offload_optimizer_device",
    "layout.zero.offload_param": "cpu_offload_param offload_param_device",
    "train.train_iters": "max_steps train_steps training_steps total_steps num_train_steps max_iters num_steps steps "
    "train_samples train_tokens num_train_epochs num_epochs epochs",
    "layout.micro_batch_size": "mbs local_batch_size device_batch_size per_device_train_batch_size "
    "train_micro_batch_size_per_gpu batch_size",
    "train.global_batch_size": "gbs train_batch_size total_batch_size global_train_batch_size batch_size "
    "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches "
    "batch_accumulation_per_replica",
    "train.rampup_batch_size": "batch_size_rampup batch_size_warmup batch_warmup global_batch_size_rampup rampup",
    "train.precision": "torch_dtype dtype params_dtype model_dtype mixed_precision mixed_precision_param "
    "bf16 fp16 fp32",
    "train.seed": "random_seed manual_seed",
    "train.eval_at_start": "eval_on_start evaluate_on_start val_at_start",
    "train.eval_interval": "eval_steps eval_freq eval_every val_check_interval",
    "train.eval_iters": "eval_batches limit_val_batches",
    "train.log_interval": "logging_steps log_freq log_every log_every_n_steps print_freq",
    "train.label_smoothing": "label_smoothing_factor",
    "train.z_loss_coeff": "z_loss_multiplier z_loss_weight",
    "layout.recompute_granularity": "gradient_checkpointing activation_checkpointing activation_checkpoint "
    "recompute_activations checkpoint_activations recompute_layer",
    "layout.torch_compile": "compile use_torch_compile",
    "layout.cuda_graph_impl": "enable_cuda_graph external_cuda_graph use_cuda_graph",
    "layout.cuda_graph_modules": "cuda_graph_scope",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.min_lr": "min_learning_rate end_lr min_lr_ratio min_lr_factor",
    "optimizer.weight_decay": "wd",
    "optimizer.adam_beta1": "beta1 beta_1 betas adam_betas",
    "optimizer.adam_beta2": "beta2 beta_2 betas adam_betas",
    "optimizer.adam_eps": "eps adam_epsilon",
    "optimizer.clip_grad": "max_grad_norm max_norm gradient_clipping grad_clip clip_grad_norm gradient_clip_val",
    "scheduler.lr_warmup_iters": "warmup_steps lr_warmup_steps num_warmup_steps warmup_iters warmup warmup_ratio "
    "warmup_fraction lr_warmup_fraction lr_warmup_samples",
    "scheduler.lr_decay_iters": "decay_steps lr_decay_steps lr_decay_samples",
    "scheduler.lr_decay_style": "lr_scheduler_type lr_scheduler decay_style decay_type",
    "data.sources.N.path": "dataset dataset_name dataset_path data_path train_data_path hf_dataset_name",
    "data.sources.N.text_key": "text_column text_column_name text_field json_keys",
    "data.tokenizer.path": "tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path vocab_file",
    "data.tokenizer.type": "tokenizer_type",
    "data.num_workers": "dataloader_num_workers num_loading_workers",
    "data.prefetch_factor": "dataloader_prefetch_factor",
    "data.pin_memory": "dataloader_pin_memory",
    "checkpoint.save_interval": "save_steps save_every checkpoint_interval ckpt_interval",
    "checkpoint.most_recent_k": "save_total_limit keep_latest_k keep_last_n_checkpoints",
    "checkpoint.keep_interval": "save_retain_interval",
    "tracking.experiment": "experiment_name mlflow_experiment",
    "tracking.tensorboard": "enable_tensorboard tensorboard_dir",
}
"""Key of a recipe -> other names for it. A name under several keys corresponds to all of them. `section.name` is a key
inside a mapping that other frameworks nest."""

NOTES: tuple[tuple[str, str], ...] = (
    (
        "torch_dtype dtype params_dtype model_dtype mixed_precision mixed_precision_param bf16 fp16 fp32",
        "one of bf16, fp16 and fp32",
    ),
    (
        "n_positions n_ctx max_positions model_max_length max_sequence_length",
        "model.seq_length is the length of training sequences",
    ),
    ("warmup_ratio warmup_fraction lr_warmup_fraction", "a number of steps: the ratio × train.train_iters"),
    (
        "num_train_epochs num_epochs epochs train_tokens train_samples lr_warmup_samples lr_decay_samples",
        "the length of a run is a number of steps of global_batch_size × seq_length tokens",
    ),
    (
        "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches "
        "batch_accumulation_per_replica",
        "accumulation follows from it: global_batch_size / (micro_batch_size × data-parallel size)",
    ),
    (
        "untie_embeddings_and_output_weights no_weight_tying disable_bias_linear",
        "the meaning is inverted",
    ),
    (
        "rope_scaling.type rope_scaling.rope_type rope_scaling.low_freq_factor rope_scaling.high_freq_factor "
        "use_rope_scaling rope_scaling.original_max_position_embeddings",
        "true is Llama 3.1's scaling, with its low_freq_factor 1, high_freq_factor 4 and 8192 original positions; YaRN "
        "is position_embedding_type: yarn, or rope_type: yarn of latent attention",
    ),
    (
        "data_parallel_size data_parallel_degree dp dp_size world_size num_gpus data_parallel_shard_degree "
        "data_parallel_replicate_degree",
        "data-parallel size is derived: ranks / (tensor × pipeline × context); --nproc sets the number of ranks",
    ),
    (
        "optimizer.type optimizer.name optimizer_type optim",
        "set optimizer.optimizer: adam (AdamW, the default), sgd, muon or lion",
    ),
    (
        "model.type model.kind model.arch model.architecture model.is_encoder_decoder",
        "remove it: models are decoders that the other keys of model describe; encoders are not supported",
    ),
    ("bos_token_id eos_token_id pad_token_id", "remove it: it comes from the tokenizer"),
    (
        "architectures model_type auto_map _name_or_path transformers_version",
        "remove it: the keys under model describe the architecture",
    ),
    (
        "use_cache pretraining_tp output_attentions output_hidden_states output_router_logits return_dict",
        "remove it: it has no effect on pretraining",
    ),
    (
        "attn_logit_softcapping final_logit_softcapping",
        "not supported: softcapping of logits",
    ),
    (
        "use_parallel_residual parallel_attn",
        "not supported: the MLP comes after attention",
    ),
    ("alibi", "not supported: positions are rope, yarn or learned_absolute"),
    ("rope_scaling.attention_factor attention_factor", "0.1 × yarn_mscale × ln(yarn_rotary_scaling_factor) + 1"),
    (
        "swiglu hidden_act hidden_activation activation_function",
        "swiglu is activation_func: silu with gated_linear_unit: true",
    ),
    ("squared_relu", "activation_func: squared_relu"),
    ("multi_query", "multi-query attention is num_query_groups: 1"),
    ("padded_vocab_size", "rows are padded to a multiple of model.make_vocab_size_divisible_by"),
    ("rms_norm_eps rms_norm_epsilon", "RMSNorm is normalization: RMSNorm"),
    (
        "rope_parameters",
        "rotary_base is rope_theta; Llama 3.1's scaling is rope_scaling: true and rope_scaling_factor; YaRN is "
        "position_embedding_type: yarn",
    ),
    ("rotary_dim", "a fraction: rotary_dim / kv_channels"),
    ("parallelism speed", "keys of layout; those of fp8 are in train"),
    ("use_rotary_position_embeddings rotary", "rope, yarn or learned_absolute"),
    (
        "attention_bias",
        "biases of the query, key and value projections; add_bias_linear is for all linear layers",
    ),
    (
        "n_shared_experts num_shared_experts",
        "the width of all shared experts together: their number × moe_ffn_hidden_size",
    ),
    (
        "first_k_dense_replace mlp_only_layers",
        "a list with 0 per dense layer and 1 per layer with experts",
    ),
    ("seq_aux", "seq_aux: true is seq_aux_loss"),
    ("topk_method", "noaux_tc is moe_router_enable_expert_bias: true"),
    ("norm_topk_prob", "norm_topk_prob: true is moe_router_pre_softmax: false"),
    ("num_layers_per_virtual_pipeline_stage", "the number of chunks per stage, not of layers per chunk"),
    ("batch_size", "sequences per forward pass on a rank, or per optimizer step"),
    ("min_lr_ratio min_lr_factor", "a learning rate: the ratio × optimizer.lr"),
    ("gradient_checkpointing recompute_layer", "selective or full"),
    ("sliding_window use_sliding_window", "set model.window_size: [n - 1, 0] for a window of n tokens"),
    ("max_window_layers layer_types", "set model.window_attn_skip_freq"),
    ("per_device_eval_batch_size", "evaluation takes layout.micro_batch_size and train.global_batch_size"),
    (
        "attn_implementation _attn_implementation use_flash_attn",
        "remove it: the attention kernel follows from the device",
    ),
    ("do_train do_eval", "remove it: llmrecipes train and llmrecipes eval"),
    ("adapter finetuning_type", "LoRA is a section: lora: {rank: 16}"),
    ("datasets", "a list of mappings with type and path"),
    ("val_set_size val_size", "shares of the documents: [95, 5, 0] is 0.05"),
    ("group_query_attention", "set model.num_query_groups"),
    ("lora_target lora_target_modules lora_target_linear", "Megatron's names; unset: all matrices"),
    ("output_dir save_dir", "remove it: --runs-dir sets where runs are stored"),
    (
        "rope_scaling",
        "Llama 3.1's scaling is rope_scaling: true, and its factor rope_scaling_factor; YaRN is "
        "position_embedding_type: yarn",
    ),
)
"""Names with an explanation: how the concept differs, or why a recipe has no such key."""


VALUES: dict[str, str] = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "float32": "fp32",
    "torch.float32": "fp32",
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "relu2": "squared_relu",
    "swish": "silu",
    "rotary": "rope",
    "learned": "learned_absolute",
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "cma-es": "CmaEsSampler",
    "random": "RandomSampler",
    "grid": "GridSampler",
    "qmc": "QMCSampler",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "patient": "PatientPruner",
    "wilcoxon": "WilcoxonPruner",
}
"""Other spellings of values, in lower case."""


@dataclass(frozen=True)
class Synonym:
    """Keys that a name corresponds to (none: a recipe has no such key) and what differs."""

    keys: tuple[str, ...]
    note: str


def _table() -> dict[str, Synonym]:
    notes = {name: note for names, note in NOTES for name in names.split()}
    meant: dict[str, list[str]] = {name: [] for name in notes}
    for key, names in SAME.items():
        for name in names.split():
            meant.setdefault(name, []).append(key)
    return {name: Synonym(tuple(keys), notes.get(name, "")) for name, keys in meant.items()}


SYNONYMS = _table()


def synonym(name: str, *, whole: bool = False) -> Synonym | None:
    """The keys for a dotted name, or for an option in Megatron-LM's form (`--tensor-model-parallel-size`).

    Args:
        whole: only an entry for the name with its section, such as `optimizer.type`.
    """
    parts = [part.lstrip("-").replace("-", "_").lower() for part in name.split(".")]
    return SYNONYMS.get(".".join(parts[-2:])) or (None if whole else SYNONYMS.get(parts[-1]))
