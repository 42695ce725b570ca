# Settings for docs/integrations/verl.md's runs without a GPU. The last five make them repeatable: one request at a
# time, a seed for each response, and responses in the order of prompts.
export VERL_USE_EXTERNAL_MODULES=tests.engine.verl_on_cpu HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1
SETTINGS="$SETTINGS
  trainer.device=cpu trainer.resume_mode=disable
  data.dataloader_num_workers=0
  actor_rollout_ref.model.use_remove_padding=False
  +actor_rollout_ref.model.override_config.attn_implementation=eager
  actor_rollout_ref.actor.use_torch_compile=False
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
  critic.model.use_remove_padding=False
  +critic.model.override_config.attn_implementation=eager
  +critic.fsdp.mixed_precision.param_dtype=fp32
  actor_rollout_ref.rollout.dtype=float32
  actor_rollout_ref.rollout.enforce_eager=True
  actor_rollout_ref.rollout.free_cache_engine=False
  +actor_rollout_ref.rollout.enable_sleep_mode=False
  actor_rollout_ref.rollout.max_model_len=64
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1
  +ray_kwargs.ray_init.address=local
  ray_kwargs.ray_init.num_cpus=16
  +ray_kwargs.ray_init.num_gpus=1
  +ray_kwargs.ray_init.include_dashboard=False
  +ray_kwargs.ray_init.object_store_memory=200000000

  actor_rollout_ref.rollout.max_num_seqs=1
  actor_rollout_ref.rollout.enable_prefix_caching=False
  actor_rollout_ref.rollout.agent.agent_loop_config_path=$PWD/loops.yaml
  actor_rollout_ref.rollout.agent.default_agent_loop=seeded
  trainer.v1.sampler.custom_sampler.path=pkg://tests.engine.verl_repeatable
  trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer"
