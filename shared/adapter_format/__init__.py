"""PEFT LoRA adapter folders: config and safetensors header against a base model → binding plan, or the reason why not.

files.py       which files of a folder make an adapter
texts.py       a tokenizer and chat template beside them (text_checks.py: what of them can work; vocabulary.py)
config.py      adapter_config.json → LoraConfig          (fields.py: how each is treated; values.py; peft_types.py)
header.py      safetensors header → TensorInfo by name   (mistaken.py: what was saved in its place)
binding.py     LoraConfig + tensors + ModelConfig → BindingPlan
  names.py       tensor names → sites of the model
  linears.py     LoRA on the layers' linears             (targets.py, overrides.py, pair.py; patterns.py)
  kinds/         all else that an adapter may hold: one file each, from the same draft.py
  unsupported.py what is left over, and what to do about it
bound.py       what a BindingPlan consists of            (summary.py: the same for people)
served.py      which kinds the engine serves
experts.py     LoRA on a mixture of experts              (parsed, not served)
finite.py      no NaN and no Inf in the data            (floats.py: numbers of any dtype as float32)
"""
