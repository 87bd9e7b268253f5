"""Other names of settings: names in other libraries, and earlier names.

If a command uses such a name, the error suggests the current one.
"""

from __future__ import annotations

_NAMES = {
    "actor.optimizer.lr": "learning_rate actor_learning_rate",
    "critic.lr": "critic_learning_rate",
    "actor.optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "actor.optimizer.warmup_steps": (
        "warmup_ratio lr_warmup_steps lr_warmup_ratio num_warmup_steps warmup_steps_proportion"
    ),
    "actor.optimizer.max_grad_norm": "grad_clip gradient_clipping clip_grad max_norm",
    "actor.optimizer.min_lr_ratio": "min_lr min_lr_rate",
    "actor.optimizer.beta1": "adam_beta1 adam_betas betas",
    "actor.optimizer.beta2": "adam_beta2",
    "actor.optimizer.eps": "adam_epsilon",
    "actor.minibatches": (
        "ppo_mini_batch_size num_iterations ppo_n_minibatches n_minibatches num_mini_batches mini_batch_size "
        "steps_per_generation"
    ),
    "actor.micro_batch.max_tokens": (
        "per_device_batch_size gradient_accumulation_steps ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "ppo_max_token_len_per_gpu micro_train_batch_size micro_batch_size max_tokens_per_mb"
    ),
    "actor.dtype": "param_dtype",
    "actor.engine.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
    "actor.engine.lora": "use_lora use_peft peft_config",
    "actor.engine.lora.alpha": "lora_alpha",
    "actor.engine.lora.rank": "lora_rank lora_r",
    "actor.engine.offload": "param_offload optimizer_offload adam_offload cpu_offload",
    "actor.freeze": "freeze_vision_tower freeze_vision_encoder freeze_multi_modal_projector freeze_mm_proj",
    "algorithm.advantage.kind": "adv_estimator advantage_estimator",
    "algorithm.advantage.lam": "lambd gae_lambda lmbda",
    "algorithm.advantage.leave_one_out": "mean_leave1out",
    "algorithm.advantage.mean": "mean_level",
    "algorithm.advantage.std": "scale_rewards norm_adv_by_std_in_grpo adv_norm std_level",
    "algorithm.aggregation.kind": "loss_agg_mode loss_type",
    "algorithm.correction.cap": (
        "behav_imp_weight_cap tis_imp_ratio_cap importance_sampling_cap actor.rejection_sampling.upper "
        "rollout_is_threshold vllm_importance_sampling_clip_max"
    ),
    "algorithm.correction.kind": "rollout_is vllm_importance_sampling_mode",
    "algorithm.entropy_coef": "entropy_coeff ent_coef entropy_loss_coef",
    "algorithm.kl.coef": "kl_loss_coef kl_coef init_kl_coef kl_ctl kl_beta beta",
    "algorithm.kl.estimator": "kl_loss_type kl_estimator kl_penalty",
    "algorithm.kl.place": "use_kl_loss use_kl_in_reward",
    "algorithm.loss.clip_low": (
        "eps_clip epsilon clip_ratio cliprange clip_range clip_eps clip_ratio_low eps_clip_low epsilon_low"
    ),
    "algorithm.loss.clip_high": "epsilon_high clip_ratio_high eps_clip_high eps_clip_higher",
    "algorithm.loss.kind": "policy_loss loss_mode loss_fn use_sapo_loss",
    "algorithm.loss.options": "c_clip clip_ratio_c delta",
    "algorithm.mask.kind": "rejection_sampling rollout_rs",
    "algorithm.mask.level": "actor.rejection_sampling.level",
    "algorithm.mask.truncated": "mask_truncated_completions overlong_filter",
    "algorithm.proximal": "use_decoupled_loss bypass_mode",
    "algorithm.ratio": "importance_sampling_level",
    "algorithm.reward.bias": "reward_bias",
    "algorithm.reward.normalize": "reward_norm",
    "algorithm.reward.overlong_cache": "soft_punish_cache overlong_buffer_len overlong_tokens",
    "algorithm.reward.scale": "reward_scaling",
    "allocation": (
        "tensor_model_parallel_size tensor_parallel_size vllm_num_engines vllm_tensor_parallel_size "
        "actor_num_gpus_per_node allocation_mode data_parallel_size backend strategy rollout.name"
    ),
    "checkpoint.every": "save_steps save_freq save_interval save_every saver.freq_steps",
    "cluster.devices": "n_gpus_per_node num_gpus n_gpus gpus",
    "critic.clip": "value_clip cliprange_value vf_clip",
    "critic.path": "value_model critic_pretrain",
    "data.batch_size": (
        "train_batch_size rollout_batch_size per_device_train_batch_size generation_batch_size "
        "consumer_batch_size global_batch_size num_prompts prompts_per_step"
    ),
    "data.columns": "prompt_key",
    "data.max_length": (
        "max_prompt_length prompt_max_len max_seq_length max_seq_len seq_len max_len sequence_length "
        "max_model_len cutoff_len"
    ),
    "data.name": "dataset_name dataset",
    "data.overlong": "truncation filter_overlong_prompts",
    "data.path": "train_files prompt_data dataset_path train_file data_path train_dataset train_dataset.path",
    "data.test_split": "val_files valid_dataset eval_dataset",
    "evaluation.every": "eval_steps test_freq eval_interval eval_every eval_freq evaluator.freq_steps",
    "evaluation.examples": "eval_size num_eval",
    "evaluation.max_new_tokens": "eval_gconfig.max_new_tokens",
    "evaluation.n": "val_kwargs rollout.val_kwargs.n",
    "evaluation.temperature": "eval_gconfig.temperature rollout.val_kwargs.temperature",
    "experiment": "project_name wandb_project tracker_project_name wandb_project_name",
    "model.chat_template": "chat_template_path apply_chat_template input_template",
    "model.dtype": "bf16 fp16 torch_dtype precision",
    "model.path": "model_name_or_path model_name pretrain model_path base_model hf_model_path",
    "publish.route": "weight_update_mode checkpoint_engine",
    "recover.every": "recover.freq_steps",
    "recover.resume": "resume_mode",
    "resume_from": "resume resume_from_checkpoint resume_from_path load_checkpoint",
    "ref.path": "ref_model ref_pretrain reference_model ref_model_path",
    "rollout.dynamic_sampling": "filter_groups algorithm.filter_groups.enable dynamic_filtering dynamic_filter_fn",
    "rollout.generation.max_new_tokens": (
        "max_tokens max_completion_length max_response_length response_length generate_max_len max_gen_length "
        "max_output_tokens max_new_token max_new_tokens gconfig.max_new_tokens data.max_response_length"
    ),
    "rollout.generation.temperature": "sampling_temperature temp temperature gconfig.temperature",
    "rollout.group_size": (
        "n num_generations n_samples n_samples_per_prompt rollouts_per_example samples_per_prompt num_samples "
        "num_return_sequences"
    ),
    "rollout.max_concurrent": "max_concurrent_rollouts",
    "rollout.max_staleness": (
        "max_head_offpolicyness max_async_level staleness_threshold max_off_policy_steps async_level"
    ),
    "rollout.reward": "reward reward_funcs reward_fn reward_function remote_rm_url reward_model custom_reward_function",
    "rollout.server.addresses": "vllm_server_base_url",
    "rollout.server.arguments": "enforce_eager vllm_enforce_eager disable_cuda_graph",
    "rollout.server.memory_share": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "rollout.server.max_sequences": "max_num_seqs max_running_requests",
    "rollout.workflow": "agent_loop env environment rollout_function",
    "run_dir": "output_dir save_path default_local_dir ckpt_path checkpoint_dir out_dir save_dir fileroot",
    "seed": "random_seed data_seed",
    "trackers.kind": "report_to logger loggers tracker log_with use_wandb stats_logger.wandb stats_logger.wandb.mode",
    "total_epochs": "num_train_epochs num_epochs epochs num_episodes max_epochs n_epochs",
    "total_steps": "max_steps total_training_steps num_steps steps train_steps num_training_steps max_train_steps",
    "trial": "run_name experiment_name wandb_run_name trial_name",
}
"""Settings, each with its names in TRL, verl, OpenRLHF, AReaL, prime-rl and other libraries.

A name is the last part of the foreign name, or the whole name if its last part is ambiguous.
"""

SYNONYMS = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Foreign name, or its last part, to the setting."""

ASSIGNMENTS = dict.fromkeys(("use_vllm", "vllm_mode"), "allocation=vllm:d1+fsdp:d1") | {"val_only": "total_steps=0"}
"""Foreign settings that are one value of a setting here, each with this assignment."""

RENAMED = {
    "actor.optimizer.momentum": "actor.optimizer.options.momentum",
    "algorithm.reward.normalise": "algorithm.reward.normalize",
    "checkpoint.best_figure": "checkpoint.best_metric",
    "critic.optimizer.lr": "critic.lr",
    "evaluation.generation.max_new_tokens": "evaluation.max_new_tokens",
    "evaluation.generation.temperature": "evaluation.temperature",
    "evaluation.rows": "evaluation.examples",
    "gap.rows": "gap.sequences",
    "launcher.options.cores_per_node": "cluster.cores",
    "launcher.options.gpus_per_node": "cluster.devices",
    "launcher.options.nodes": "cluster.nodes",
    "rollout.endpoint.rows": "rollout.endpoint.sequences_per",
    "rollout.rehearsal": "rollout.trial_episode",
    "rollout.server.slots": "rollout.server.max_sequences",
    "trackers.name": "trial",
    "trackers.project": "experiment",
}
"""Earlier names of settings, each with the current one."""
