from __future__ import annotations
from typing import Any
from llmrecipes.plan.derive import Plan

def deepspeed_config(plan: Plan) -> dict[str, Any]:
    r=plan.recipe; z=r.zero; t=r.train
    zo={"stage":z.stage,"reduce_bucket_size":z.reduce_bucket_size,"overlap_comm":z.overlap_comm,"contiguous_gradients":True,"reduce_scatter":True}
    if z.stage in (1,2): zo["allgather_bucket_size"]=z.allgather_bucket_size
    if z.stage==3: zo|={k:getattr(z,k) for k in ("sub_group_size","stage3_prefetch_bucket_size","stage3_param_persistence_threshold","stage3_max_live_parameters","stage3_max_reuse_distance")}
    if z.offload_optimizer!="none": zo["offload_optimizer"]={"device":z.offload_optimizer,"pin_memory":False}|({"nvme_path":z.nvme_path} if z.offload_optimizer=="nvme" else {})
    if z.offload_param!="none": zo["offload_param"]={"device":z.offload_param,"pin_memory":False}|({"nvme_path":z.nvme_path} if z.offload_param=="nvme" else {})
    c={"train_batch_size":t.global_batch_size,"train_micro_batch_size_per_gpu":t.micro_batch_size,"gradient_accumulation_steps":plan.num_microbatches,
       "zero_optimization":zo,"zero_allow_untested_optimizer":True,"zero_force_ds_cpu_optimizer":False,"steps_per_print":None,"gradient_clipping":r.optimizer.clip_grad}
    if t.precision=="bf16": c["bf16"]={"enabled":True}
    if t.precision=="fp16": c["fp16"]={"enabled":True,"loss_scale":0,"initial_scale_power":int(__import__("math").log2(t.initial_loss_scale)),"loss_scale_window":t.loss_scale_window,"hysteresis":t.hysteresis,"min_loss_scale":t.min_loss_scale,"consecutive_hysteresis":False}
    if t.precision!="fp32" and r.parallelism.grad_reduce_in_fp32: c["communication_data_type"]="fp32"; c["data_types"]={"grad_accum_dtype":"fp32"}
    return c
