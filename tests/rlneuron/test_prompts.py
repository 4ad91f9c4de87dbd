"""Prompts to token ids: one BOS, no invented fields, one policy for prompts that are too long."""

import pytest

from rlneuron.prompts import PromptRow, clean_messages, fit_prompts, prompt_hash, render

CHATML = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}!{% endif %}{% endif %}"
)


def make_tokenizer(template: str | None = CHATML, *, adds_bos: bool = True, adds_eos: bool = False):
    """A character tokenizer with specials, as Llama's: text gets a BOS in front."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>", "<tool>", "<end>"]
    characters = [chr(code) for code in range(32, 127)] + ["\u00e9", "\n"]
    vocabulary = {token: index for index, token in enumerate([*specials, *characters])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    if adds_bos or adds_eos:
        single = ("<bos> " if adds_bos else "") + "$A" + (" <eos>" if adds_eos else "")
        raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": specials[3:]})
    tokenizer.chat_template = template
    return tokenizer


def row(prompt) -> PromptRow:
    return PromptRow(prompt=prompt, uid="u")


def text_of(prompt, tokenizer=None, **kwargs) -> str:
    tokenizer = tokenizer or make_tokenizer()
    return tokenizer.decode(render(tokenizer, row(prompt), **kwargs))


USER = [{"role": "user", "content": "hi"}]


def test_a_conversation_goes_through_the_chat_template():
    assert text_of(USER) == "<bos><user>hi<end><assistant>"
    assert text_of(USER, chat_template_kwargs={"thinking": True}) == "<bos><user>hi<end><assistant>!"
    assert text_of(USER, system_prompt="be") == "<bos><system>be<end><user>hi<end><assistant>"
    own = [{"role": "system", "content": "mine"}, *USER]
    assert text_of(own, system_prompt="be") == "<bos><system>mine<end><user>hi<end><assistant>"


def test_an_assistant_message_is_continued():
    assert text_of([*USER, {"role": "assistant", "content": "we"}]) == "<bos><user>hi<end><assistant>we"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("adds_eos", [True, False])
def test_there_is_exactly_one_bos_where_template_or_tokenizer_writes_one(adds_bos, adds_eos):
    tokenizer = make_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos)
    assert render(tokenizer, row(USER)).count(0) == 1
    assert render(tokenizer, row("plain")).count(0) == adds_bos
    assert render(tokenizer, row("<bos>plain")).count(0) == 1
    assert render(tokenizer, row("plain"))[-1] != 1, "a prompt to be continued is not closed by EOS"


def test_a_template_without_bos_is_left_without():
    tokenizer = make_tokenizer(CHATML.replace("{{ bos_token }}", ""))
    assert render(tokenizer, row(USER)).count(0) == 0


def test_none_fields_do_not_appear_in_the_text():
    filled = [{"role": "user", "content": "hi", "tool_calls": None, "name": None}]
    assert clean_messages(filled) == USER
    assert text_of(filled) == text_of(USER)
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": "\u00e9"}}}],
    }
    answer = {"role": "tool", "content": "ok"}
    assert (
        text_of([*USER, call, answer])
        == '<bos><user>hi<end><assistant>CALL{"x": "\u00e9"}<end><tool>ok<end><assistant>'
    )


def test_tool_arguments_as_text_and_as_object_render_alike():
    def conversation(arguments):
        return [*USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]},
                {"role": "tool", "content": "ok"}]  # fmt: skip

    assert text_of(conversation('{"x": 1}')) == text_of(conversation({"x": 1}))
    assert "CALL" in text_of(conversation({"x": 1}))
    assert text_of(conversation({"x": 1, "y": None})) == text_of(conversation({"x": 1}))


@pytest.mark.parametrize(
    ("prompt", "kwargs", "template", "words"),
    [
        (USER, {}, None, "the model's tokenizer has no chat template"),
        ("hi", {"system_prompt": "be"}, CHATML, "data.system_prompt is set but the prompt 'hi' is plain text"),
        ([{"role": "system", "content": "x"}], {}, CHATML, "the last message of a prompt has role 'system'"),
    ],
)
def test_what_cannot_be_rendered_is_one_sentence(prompt, kwargs, template, words):
    with pytest.raises(ValueError, match=words):
        text_of(prompt, make_tokenizer(template), **kwargs)


def test_hashes_tell_prompts_apart():
    assert prompt_hash("a") != prompt_hash([{"role": "user", "content": "a"}])
    assert prompt_hash("a") != prompt_hash("a ")
    assert prompt_hash("\ud800") == prompt_hash("\ud800")  # half a surrogate pair does not end the run


# ---- over-long prompts: 63, 64, 65 and 2000 tokens at a limit of 64 -----------------------------------------------
LENGTHS = [63, 64, 65, 2000]
IDS = [list(range(length)) for length in LENGTHS]
ROWS = [row("x" * length) for length in LENGTHS]


def test_overlong_prompts_end_the_run_by_default():
    with pytest.raises(ValueError, match=r"2 of 4 prompts are longer than 64 tokens \(the first, row 2, has 65: "):
        fit_prompts(ROWS, IDS, 64, "error")
    assert fit_prompts(ROWS[:2], IDS[:2], 64, "error").num_overlong == 0


def test_overlong_prompts_can_be_dropped_or_cut():
    dropped = fit_prompts(ROWS, IDS, 64, "filter")
    assert (dropped.rows, dropped.token_ids, dropped.num_overlong) == (ROWS[:2], IDS[:2], 2)
    cut = fit_prompts(ROWS, IDS, 64, "truncate")
    assert (cut.rows, cut.num_overlong) == (ROWS, 2)
    assert [len(ids) for ids in cut.token_ids] == [63, 64, 64, 64]
    assert cut.token_ids[3][-1] == 1999


def test_no_prompt_left_is_an_error():
    with pytest.raises(ValueError, match="all 1 prompts are longer than 64 tokens"):
        fit_prompts(ROWS[3:], IDS[3:], 64, "filter")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="has no tokens"):
        fit_prompts([row("x")], [[]], 64, "error")
