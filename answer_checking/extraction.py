r"""Finds the final answer of a response.

The final answer is the content of the last \boxed{...}, or else the first line of text
after the last ####. It must come after the thoughts, which end with a tag such as
</think>.
"""

import re

# A brace that is not escaped, together with the \boxed in front of it if there is one.
BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*)?(?<!\\)(?:\\\\)*[{}]")

# The tags that begin and end a thought. A tag in < > or ◁ ▷ is recognized by a word in
# its name, such as "think" in <think level="high"> and <|START_THINKING|>. It ends the
# thought if the name also has a / or a word such as "end". Other tags are listed: those
# of models that can be trained here, and those of vLLM's reasoning parsers.
# Repetitions in names are bounded, so no response takes long to read.
CHARACTER = r"[\w:|｜▁/-]"
NAME = (
    rf"{CHARACTER}{{0,30}}(?:think|thought|reason|analy[sz]|scratch|reflect|rationale|"
    r"monolog|deliberat|brainstorm|internal|draft|contemplat|working_?out|思考|推理|"
    r"inner_voice|(?<![a-z])(?:cot(?!\s[^<>=]{1,99}[<>])|plan(?:ning)?)(?![a-z]))"
    rf"{CHARACTER}{{0,30}}(?:\s[^<>]{{0,99}})?[>▷]"
)
THOUGHT_TAG = re.compile(
    rf"""(?ix)
    (?P<end>
        # </think>, <think/>, ◁/think▷, </seed:think>, <|end_of_thought|>, <think_end>
        [<◁] (?={CHARACTER}{{0,30}}
            (?:/|(?<![a-z])(?:end|stop|close|finish|done|suffix))) {NAME}
        | (?-i:\[/(?:THINK|THINKING|THOUGHT|REASONING)\])       # Magistral
        | <\|channel\|>\s?final(?:\s<\|constrain\|>\w*)?        # gpt-oss
        | <channel\|>                                           # Gemma 4
        | <\|content(?:_text)?\|>                               # Solar Open, Inkling
        | <\|inner_suffix\|>                                    # Apertus
        | <unused95>                                            # MedGemma
        # The tags of the next line end no thought if nothing follows them.
        | (?:<\|im_start\|>answer | <\|(?:answer|response|final)\|>)(?=\s*\S) # s1
        | <\|(?:close\|>think|open\|>response)<\|sep\|>         # Kimi K3
        | to=user<\|message\|>                                  # Muse
        | Here(?:\sis|'s)\smy\sresponse:                        # Granite 3.2
        | \[BEGIN\sFINAL\sRESPONSE\]                            # Apriel
    )
    | (?P<begin>
        [<◁] {NAME}
        | (?-i:\[(?:THINK|THINKING|THOUGHT|REASONING)\])
        | <\|channel\|?>\w*(?:<\|message\|>)?
        | <\|inner_prefix\|>
        | <unused94>
        | <\|im_start\|>(?:assistant/)?think                     # s1, HyperCLOVA X
        | <\|open\|>think<\|sep\|>
        | to=self<\|message\|>
        | \A\s*Here(?:\sis|'s)\smy\sthought\sprocess:
    )"""
)
# What ends the model's turn: <|im_end|>, <|eot_id|>, <|end_of_turn|>, <turn|>, </s>, or
# the beginning of the user's turn. In gpt-oss and Solar Open, <|end|> may also separate
# two messages of the model's turn, and then does not end the turn.
TURN_END = re.compile(
    r"""(?ix)
    [<\[][|｜] (?:(?:im|role|turn|assistant)_end|(?:\w+:)?eo[astdm](?:_id|_token)?|
        return|user(?:_token)?|human|prompter|observation|
        end(?:_?of_?(?:text|turn|utterance|sentence|message|response|user|assistant)\w*|
        ▁of▁sentence)?) [|｜][>\]]
        (?!<\|(?:start|begin)\|>assistant|to=user)
    | <(?:end_of_(?:turn|utterance)|start_of_turn|(?:\w+:)?eos|eod|/s|turn\||role)>
    | \[INST\] | \[e~\[
    | <\|(?:(?:im_(?:start|user)|header_start|start_header_id|start_of_role|start|begin)
        \||turn)>user
    | <(?:extra_id|SPECIAL)_\d+>User"""
)
# Control tokens such as <|im_end|>, <｜end▁of▁sentence｜>, <turn|> and </s>, and tags
# around an answer. None of them belongs to the answer.
CONTROL_TOKEN = re.compile(
    r"(?i)<[|｜][^<>\s]*>|<\w+[|｜]>|"
    r"</?(?:s|bos|eos|pad|end_of_turn|answer|response|output|solution)>"
)


def last_thought_tag(text: str) -> re.Match | None:
    """Return the last tag of a thought; it has a group "begin" or a group "end"."""
    *_, last = [None, *THOUGHT_TAG.finditer(text)]
    return last


def without_thoughts(response: str) -> str:
    """Return the text after the thoughts in the first turn, without control tokens.

    The result is "" if the last thought has not ended: there is no answer yet. Turns
    that the model invents after its own are not graded.
    """
    response = TURN_END.split(response, maxsplit=1)[0]
    tag = last_thought_tag(response)
    if tag and tag["begin"]:
        return ""
    return CONTROL_TOKEN.sub("", response[tag.end() :] if tag else response)


def final_answer(text: str) -> str:
    r"""Return the content of the last box, or the first line after the last ####.

    The result is "" if there is neither a box nor a ####.
    """
    if box := last_box(text):
        return box
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n")[0] if marker else ""


def last_box(text: str) -> str:
    r"""Return the content of the last \boxed{...} or \fbox{...} to close, or else "".

    The text is read once, so that a megabyte of braces takes no longer than other text.
    """
    content = ""
    open_braces = []
    for brace in BRACE.finditer(text):
        if brace[0].endswith("{"):
            open_braces.append(brace)
        elif open_braces and (opening := open_braces.pop())["box"]:
            content = text[opening.end() : brace.start()]
    return content
