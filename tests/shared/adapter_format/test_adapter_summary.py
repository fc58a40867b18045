from shared.adapter_format.summary import summarise
from tests.shared.adapter_format.adapter_samples import BIASED_MODEL, MODEL, PREFIX, TIED_MODEL, bind, info, tensors

EMBED = f"{PREFIX}model.embed_tokens"


def test_layers_that_are_alike_are_one_line():
    entries = tensors(["q_proj", "v_proj"]) | tensors(["v_proj"], [1], rank=2)
    lines = summarise(bind(entries, rank_pattern={"1.self_attn.v_proj": 2}), MODEL)
    assert [(line.module, line.layers, line.rank, line.scale, line.num_tensors) for line in lines] == [
        ("q_proj", "0-2", 4, 2.0, 6),
        ("v_proj", "0,2", 4, 2.0, 4),
        ("v_proj", "1", 2, 4.0, 2),
    ]
    assert lines[0].device_bytes == 3 * 2 * 4 * (16 + 16)
    assert lines[2].device_bytes == 2 * 2 * (16 + 8)


def test_vectors_cost_four_bytes_a_row():
    entries = tensors(["q_proj"])
    for layer in range(3):
        for name, size in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
            role = "base_layer.bias" if name == "q_proj" else "bias"
            entries[f"{PREFIX}model.layers.{layer}.self_attn.{name}.{role}"] = info("F32", (size,))
        entries[f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector"] = info("F32", (16,))
    bound = bind(entries, BIASED_MODEL, target_modules=["q_proj"], use_dora=True, bias="all")
    lines = {line.module: line for line in summarise(bound, BIASED_MODEL)}
    assert lines["q_proj"].kinds == ("lora", "dora", "bias")
    assert lines["q_proj"].device_bytes == 3 * (2 * 4 * 32 + 2 * 4 * 16)  # gain and offset
    assert (lines["k_proj"].kinds, lines["k_proj"].rank, lines["k_proj"].device_bytes) == (("bias",), 0, 3 * 4 * 8)


def test_embedding_head_and_norms():
    rows = {f"{EMBED}.token_adapter.trainable_tokens_delta": info("F32", (2, 16))}
    norm = {f"{PREFIX}model.norm.weight": info("F32", (16,))}
    bound = bind(tensors() | rows | norm, TIED_MODEL, trainable_token_indices=[32, 5], modules_to_save=["model.norm"])
    lines = summarise(bound, TIED_MODEL)[2:]
    assert [(line.module, line.layers, line.kinds) for line in lines] == [
        ("norm", "", ("modules_to_save",)),
        ("embed_tokens", "", ("trainable_tokens",)),
        ("lm_head", "", ("trainable_tokens",)),
    ]
    assert [line.device_bytes for line in lines] == [2 * 16, 2 * (2 * 16 + 8), 2 * (2 * 16 + 8)]


def test_a_saved_matrix_costs_at_most_all_its_rows():
    bound = bind(tensors() | {f"{EMBED}.weight": info("F32", (32, 16))}, modules_to_save=["embed_tokens"])
    assert summarise(bound, MODEL)[-1].device_bytes == 32 * (2 * 16 + 8)


def test_blocks_are_told():
    entries = tensors(["q_proj"]) | {
        f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_A.weight": info("F32", (4, 8)) for layer in range(3)
    }
    blocks = {"target_modules_bd_a": ["q_proj"], "nblocks": 2}
    (line,) = summarise(bind(entries, target_modules=["q_proj"], use_bdlora=blocks), MODEL)
    assert line.kinds == ("lora", "block_diagonal")
