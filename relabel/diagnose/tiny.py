"""The small diagnosis model that ships: an Idefics3 (the class of SmolVLM) built from scratch.

A SigLIP-style encoder, the pixel-shuffle connector, a Llama of a few layers, and a byte-level BPE
tokenizer trained on the answers. Nothing in it is special: it is saved and loaded by
transformers' Auto classes like any other model of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from regrasp.relabel.diagnose.frames import FrameChoice, moment
from regrasp.relabel.diagnose.model import DiagnosisModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.image_utils import PILImageResampling

PAD, END, IMAGE = "<pad>", "<end_of_utterance>", "<image>"
#: Idefics3's processor writes pictures as these and the image token.
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"

#: The parts of the message one after the other, and a line of its own for the answer.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinySize:
    """Sizes of the network.

    Attributes:
        patch: side of a patch, pixels; the picture's side is a multiple of it.
        shuffle: side of the square of patches that becomes one token of the language model.
        vision_width, vision_layers: of the encoder.
        text_width, text_layers: of the language model.
        head: width of an attention head; both widths are multiples of it.
        vocabulary: entries of the tokenizer, at most.
    """

    patch: int = 16
    shuffle: int = 6
    vision_width: int = 128
    vision_layers: int = 4
    text_width: int = 192
    text_layers: int = 4
    head: int = 32
    vocabulary: int = 1536

    def __post_init__(self) -> None:
        if self.vision_width % self.head or self.text_width % self.head:
            raise ValueError(
                f"TinySize: widths {self.vision_width} and {self.text_width} must be multiples "
                f"of head {self.head}"
            )


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, names: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it can write any text, and those like ``texts`` shortly.

    Digits are entries of their own, so that a step number in an answer is written like the one
    in the question, whichever it is.

    Args:
        texts: questions and answers as the model will see them.
        vocabulary: entries at most; fewer where the texts give no more.
        names: get an entry each besides: what is one choice is one token, and no model can begin
            one name and end with another.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, IMAGE, _AROUND, _GLOBAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(names))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build(
    texts: Iterable[str],
    types: Sequence[str],
    *,
    choice: FrameChoice | None = None,
    size: TinySize | None = None,
    seed: int = 0,
) -> DiagnosisModel:
    """A new model with random weights.

    Args:
        texts: to train the tokenizer on; see :func:`train_tokenizer`.
        types: the failure types there are.
        choice: what it is shown.
        size: of the network.
        seed: of the weights.

    Raises:
        ValueError: if the picture is no whole number of tokens.
    """
    choice, size = choice or FrameChoice(), size or TinySize()
    if choice.size % (size.patch * size.shuffle):
        raise ValueError(
            f"build: a picture of {choice.size} pixels is no multiple of "
            f"{size.shuffle} patches of {size.patch}"
        )
    moments = [moment(i) for i in range(choice.frames)] if choice.count_by == "moment" else []
    tokenizer = train_tokenizer(texts, size.vocabulary, [*types, *moments])
    square = {"longest_edge": choice.size}
    processor = Idefics3Processor(
        # Pictures come in the right size; the default filter, Lanczos, only warns.
        Idefics3ImageProcessor(
            size=square,
            max_image_size=square,
            do_image_splitting=False,
            resample=PILImageResampling.BICUBIC,
        ),
        tokenizer,
        image_seq_len=(choice.size // size.patch // size.shuffle) ** 2,
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(_config(choice, size, tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return DiagnosisModel(model, processor, types, choice)


def _config(
    choice: FrameChoice, size: TinySize, tokenizer: PreTrainedTokenizerFast
) -> Idefics3Config:
    """The configuration that transformers builds the network from."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    return Idefics3Config(
        vision_config={
            "hidden_size": size.vision_width,
            "intermediate_size": 3 * size.vision_width,
            "num_hidden_layers": size.vision_layers,
            "num_attention_heads": size.vision_width // size.head,
            "image_size": choice.size,
            "patch_size": size.patch,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": size.text_width,
            "intermediate_size": 5 * size.text_width // 2,
            "num_hidden_layers": size.text_layers,
            "num_attention_heads": size.text_width // size.head,
            "num_key_value_heads": size.text_width // size.head,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "pad_token_id": pad,
            "bos_token_id": None,
            "eos_token_id": end,
        },
        scale_factor=size.shuffle,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=end,
    )
