r"""Where the final answer of a response is.

It stands behind the thoughts, which end with </think> or a tag like it: in the last
\boxed{...}, or else behind the last ####.
"""

import re

# A brace that is not escaped, with the \boxed in front of it if there is one.
BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*)?(?<!\\)(?:\\\\)*[{}]")
# <think>, </think>, <|begin_of_thought|>, [THINK], ◁/think▷, </seed:think>
THOUGHT = re.compile(
    r"(?i:[<◁]\|?(?:/|end_of_|end_)?(?:[a-z]+[_:]|begin_of_)?"
    r"(?:think(?:ing)?|thoughts?|reasoning)\|?[>▷])|\[/?THINK\]"
)
# <|im_end|>, <｜end▁of▁sentence｜>, </s>: where a response is decoded with them.
SPECIAL_TOKEN = re.compile(
    r"<[|｜][^<>\s]*[|｜]>|</?(?:s|bos|eos|pad|end_of_turn|answer)>"
)


def last_thought_tag(text: str) -> re.Match | None:
    """The last tag that begins or ends a thought."""
    *_, last = [None, *THOUGHT.finditer(text)]
    return last


def ends_thought(tag: str) -> bool:
    """Whether a tag of a thought is the one at its end."""
    return "/" in tag or "end_" in tag.lower()


def without_thoughts(response: str) -> str:
    """What follows the thoughts of a model that thinks first, which end with </think>.

    Where a thought has not ended, nothing is an answer yet. Special tokens say nothing.
    """
    tag = last_thought_tag(response)
    if tag and not ends_thought(tag[0]):
        return ""
    return SPECIAL_TOKEN.sub("", response[tag.end() :] if tag else response)


def final_answer(text: str) -> str:
    r"""The last \boxed{...}, or else the line behind the last ####, or else ""."""
    if box := last_box(text):
        return box
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n")[0] if marker else ""


def last_box(text: str) -> str:
    r"""The content of the last \boxed{...} or \fbox{...} to close; "" without one.

    The text is read once, so that a megabyte of braces takes no longer than other text.
    """
    content = ""
    open_braces = []
    for brace in BRACE.finditer(text):
        if brace[0].endswith("{"):
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening["box"]:
                content = text[opening.end() : brace.start()]
    return content
