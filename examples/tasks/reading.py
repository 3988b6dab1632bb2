"""Read numbers: a generator of pictures of them, and a tiny multimodal model that has learned nothing yet.

`python examples/tasks/reading.py examples/pictures/reading-model` writes the model of examples/pictures/reading.yaml.
Place, size, color, and noise of each number are drawn: no picture occurs twice.
"""

import base64
import io
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SIDE = 32  # pixels
PATCH = 16
Row = dict[str, str]


def generate(seed: int, num_train: int, num_heldout: int) -> tuple[list[Row], list[Row]]:
    """Draw examples to train and to validate on. Columns: question, answer, image (a PNG as a `data:` URI)."""
    draw = random.Random(seed)
    heldout = [_example(draw) for _ in range(num_heldout)]
    return [_example(draw) for _ in range(num_train)], heldout


def _example(draw: random.Random) -> Row:
    answer, file = str(draw.randrange(10, 100)), io.BytesIO()
    _picture(draw, answer).save(file, "PNG")
    image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"question": "Number?", "answer": answer, "image": image}


def _picture(draw: random.Random, text: str) -> Image.Image:
    """Draw a text in dark colors on light noise."""
    pixels = bytes(draw.randrange(200, 256) for _ in range(3 * SIDE * SIDE))
    image = Image.frombytes("RGB", (SIDE, SIDE), pixels)
    font = ImageFont.load_default(draw.choice((15, 16)))
    left, top, right, bottom = font.getbbox(text)
    middle = ((SIDE - right - left) / 2, (SIDE - bottom - top) / 2)
    place = tuple(at + draw.uniform(-2, 2) for at in middle)
    ImageDraw.Draw(image).text(place, text, fill=tuple(draw.randrange(110) for _ in range(3)), font=font)
    return image


# --- The model -------------------------------------------------------------------------------------

SPECIAL = {"eos_token": "<|end|>", "pad_token": "<pad>"}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path) -> None:
    """Write a LLaVA of a million parameters: a vision tower, a projector, a decoder, and a tokenizer of characters."""
    import torch  # noqa: PLC0415 - the generator does not need it
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    characters = Tokenizer(models.WordLevel({chr(code): code - 32 for code in range(32, 127)}, "?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, **SPECIAL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<image>"]})
    tokenizer.chat_template = TEMPLATE
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size), tokenizer, patch_size=PATCH,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE,
        patch_size=PATCH,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, initializer_range=0.04, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=vision, vision_feature_layer=-1,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=(SIDE // PATCH) ** 2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
