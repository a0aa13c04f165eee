"""One interface for the small model and for others: it learns, looks, and loads again."""

import json
from dataclasses import replace

import pytest
import torch
from regrasp.relabel.diagnose.answer import Unparseable
from regrasp.relabel.diagnose.frames import FrameChoice
from regrasp.relabel.diagnose.metrics import score
from regrasp.relabel.diagnose.model import SETTINGS, DiagnosisModel
from regrasp.relabel.diagnose.tiny import CHAT_TEMPLATE, TinySize, build, train_tokenizer
from regrasp.relabel.diagnose.training import Trainer, TuneConfig, shuffled
from squares import CHOICE, STEPS, TYPES, examples, small_model, squares
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipImageProcessor,
)

FIT = TuneConfig(minutes=0, steps=180, batch=8, lr=3e-3, warmup=20, threads=1, bf16=False)


def fit(folder, model, config=FIT):
    return Trainer(folder, model, config).run(shuffled(examples(model), 0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that has seen the eight episodes often, and its folder."""
    folder = tmp_path_factory.mktemp("trained")
    return fit(folder, small_model()), folder / "model"


def test_learns_eight_episodes_by_heart(trained):
    episodes, truths = squares()
    assert trained[0].diagnose(episodes, batch=3) == truths


def test_without_pictures_it_does_not_know(tmp_path):
    """All eight questions read the same, so without pictures one answer has to do for all."""
    episodes, truths = squares()
    blind = fit(tmp_path, small_model(replace(CHOICE, blank=True)), replace(FIT, steps=100))
    answers = blind.diagnose(episodes)
    assert len(set(answers)) == 1
    figures = score(answers, truths, [STEPS] * 8).figures
    assert figures["detection_balanced_accuracy"].value == 0.5
    assert figures["type_macro_accuracy"].value <= 0.5


def test_loaded_model_answers_the_same(trained, tmp_path):
    episodes, truths = squares()
    model, folder = trained
    loaded = DiagnosisModel.load(folder)
    assert (loaded.types, loaded.choice) == (model.types, model.choice)
    assert loaded.diagnose(episodes) == truths
    model.save(tmp_path / "half", dtype=torch.float16)
    half = DiagnosisModel.load(tmp_path / "half")
    assert half.model.dtype == torch.float32
    assert half.diagnose(episodes) == truths
    sizes = [(f / "model.safetensors").stat().st_size for f in (tmp_path / "half", folder)]
    assert sizes[0] < 0.6 * sizes[1]


def test_it_is_an_ordinary_hugging_face_model(trained):
    """Loaded and asked as any other, without this package."""
    model, folder = trained
    network = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True)
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    example = examples(model)[0]
    text = processor.apply_chat_template(example.question.messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=[list(example.question.images)], return_tensors="pt")
    tokens = network.generate(**inputs, max_new_tokens=200, do_sample=False)
    written = tokens[0, inputs["input_ids"].shape[1] :]
    assert processor.tokenizer.decode(written, skip_special_tokens=True) == example.answer


def test_an_untrained_model_is_wrong_not_an_error():
    episodes, truths = squares()
    answers = small_model().diagnose(episodes)
    assert all(isinstance(answer, Unparseable) for answer in answers)
    figures = score(answers, truths, [STEPS] * 8).figures
    assert figures["parsed"].value == figures["detection_balanced_accuracy"].value == 0


def test_batches_do_not_change_answers(trained):
    """Also of questions of unequal length, which are padded."""
    episodes, _ = squares()
    longer = replace(
        episodes[1].header, instruction="keep the square as red as it was in the beginning"
    )
    episodes[1] = replace(episodes[1], header=longer)
    alone = [trained[0].diagnose([episode])[0] for episode in episodes]
    assert trained[0].diagnose(episodes) == alone


def llava(types):
    """A random model of another class, with its own processor."""
    tokenizer = train_tokenizer(["failed: no"] * 3, 300)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
        },
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
        },
        image_token_index=image,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )  # fmt: skip
    processor = LlavaProcessor(
        SiglipImageProcessor(size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=16,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(0)
    return DiagnosisModel(LlavaForConditionalGeneration(config), processor, types, CHOICE)


def test_a_model_of_another_class(tmp_path):
    episodes, _ = squares()
    model = llava(TYPES)
    before = model.write([examples(model)[0].question])
    model.save(tmp_path / "llava")
    (tmp_path / "llava" / SETTINGS).unlink()  # somebody else's has none
    with pytest.raises(ValueError, match="name the failure types"):
        DiagnosisModel.load(tmp_path / "llava")
    loaded = DiagnosisModel.load(tmp_path / "llava", types=TYPES, choice=CHOICE)
    assert loaded.write([examples(model)[0].question]) == before
    assert DiagnosisModel.load(tmp_path / "llava", types=TYPES).choice.explain
    tuned = fit(tmp_path / "run", loaded, replace(FIT, steps=2, lora_rank=2))
    assert len(tuned.diagnose(episodes[:2])) == 2


def test_what_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        DiagnosisModel.load("HuggingFaceTB/SmolVLM-256M-Instruct")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/config.json").write_text("{}")
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors; it holds .*pytorch_model.bin"):
        DiagnosisModel.load(tmp_path / "pickled", types=TYPES)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    text.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match=r"Llama.*(?s:.*)AutoModelForImageTextToText"):
        DiagnosisModel.load(tmp_path / "text", types=TYPES)


def test_saved_folder_is_replaced_whole(trained, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "stale.safetensors").write_bytes(b"")
    trained[0].save(tmp_path / "m")
    assert not (tmp_path / "m" / "stale.safetensors").exists()
    assert json.loads((tmp_path / "m" / SETTINGS).read_text())["types"] == list(TYPES)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_default_size_ships_within_ten_megabytes():
    model = build(["failed: no"] * 3, TYPES)
    # The vocabulary of these texts is small; a full one has this many more rows.
    rows = TinySize().vocabulary - len(model.tokenizer)
    count = sum(p.numel() for p in model.model.parameters()) + rows * TinySize().text_width
    assert count < 5_000_000
    assert 2 * count < 10e6


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no multiple"):
        build(["x"] * 3, TYPES, choice=FrameChoice(size=100))
    with pytest.raises(ValueError, match="multiples of head"):
        TinySize(text_width=100)
    with pytest.raises(ValueError, match="no failure types"):
        build(["x"] * 3, ())


def test_tokenizer_writes_anything_and_numbers_digit_by_digit():
    tokenizer = train_tokenizer(["steps: 12-345", "the milk"] * 5, 400)
    for text in ("steps: 12-345", "ünïcode → ☃\n\ttab", "+12 -30 +0 mm"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("12345")["input_ids"]) == 5
    assert len(tokenizer("the milk")["input_ids"]) == 2


def test_a_types_name_is_one_token_and_comes_back_as_it_was():
    text = "type: lost_grip\nwhy: it lost grip of lost_grip"
    tokenizer = train_tokenizer([text] * 5, 400, ["lost_grip", "off_position"])
    tokens = tokenizer(text)["input_ids"]
    name = tokenizer.convert_tokens_to_ids("lost_grip")
    assert tokens.count(name) == 2
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokenizer("type: off_position")["input_ids"]) == "type: off_position"
