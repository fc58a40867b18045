"""PEFT LoRA adapter folders: config and safetensors header against a base model → binding plan, or the reason why not.

files.py       which files of a folder make an adapter
config.py      adapter_config.json → LoraConfig      (fields.py: every field and how it is treated)
header.py      safetensors header → TensorInfo by name
binding.py     LoraConfig + tensors + ModelConfig → BindingPlan   (names.py, targets.py, patterns.py)
unsupported.py what is valid for PEFT and not served, and what to do about it
finite.py      no NaN and no Inf in the data
"""
