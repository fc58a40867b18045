"""`loraplex adapter convert`: adapters that were trained against a modified base model become plain LoRA, exactly.

PiSSA, OLoRA and KaSA take something of low rank out of each base weight before training, and their saved A and B count
from what is left. What was taken out follows from the base weights alone, so it is computed again and subtracted by a
second half of the rank: A' = [A; A₀], B' = [B, −B₀], at twice the rank and the same scale.

tensors.py      safetensors files read by ranges and written, by numpy
removed.py      what each initialisation takes out of a weight: A₀ and B₀
adapter.py      the adapter's folder: what it is, its tensors and scales
conversion.py   folder + base model → folder
"""
