"""Flags and recipes: what they are taken for, and what is refused in one sentence."""

from dataclasses import replace

import pytest
from conftest import ROOT

from eval import EvalConfig
from loss import OBJECTIVES
from support.flags import Flags, Refused, find_objective, parse_flags
from train import Config

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path):
    """Writes a YAML file; returns the flag that names it."""

    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return f"--config={path}"

    return write


def refusal(*flags: str, kind: type[Flags] = Config) -> str:
    """The sentence that refuses these flags."""
    with pytest.raises(Refused) as refused:
        parse_flags(kind, list(flags))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_flags_override_the_recipe_and_the_recipe_the_defaults(recipe):
    file = recipe("objective: grpo\nsteps: 7\n")
    cfg = parse_flags(Config, [file, "--steps=9"])
    assert (cfg.objective, cfg.steps) == ("grpo", 9)
    assert cfg.group_size == Config().group_size == 8


# Types. A flag is text; a value of YAML has a type of its own already.


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("steps", "40.5", "input should be a valid integer"),
        ("group_size", "3.7", "input should be a valid integer"),
        ("steps", "0", "input should be greater than 0"),
        ("group_size", "1", "input should be greater than or equal to 2"),
        ("lag", "-1", "input should be greater than or equal to 0"),
        ("learning_rate", "inf", "input should be a finite number"),
        ("learning_rate", "nan", "input should be a finite number"),
        ("learning_rate", "0", "input should be greater than 0"),
        ("learning_rate", "fast", "input should be a valid number"),
        ("weight_decay", "-0.1", "input should be greater than or equal to 0"),
        ("top_p", "nan", "input should be"),
        ("top_p", "0", "input should be greater than 0"),
        ("top_p", "1.5", "input should be less than or equal to 1"),
        ("temperature", "nan", "input should be"),
        ("temperature", "3", "input should be less than or equal to 2"),
        ("temperature", "0.001", "input should be greater than or equal to 0.01"),
        ("dtype", "float16", "input should be 'auto', 'float32' or 'bfloat16'"),
        ("resume", "maybe", "input should be a valid boolean"),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_refused_from_a_flag_and_a_recipe(
    field, value, reason, recipe
):
    assert refusal(f"--{field}={value}").startswith(f"{field} is '{value}': {reason}")
    # YAML spells what is not finite with a dot.
    in_yaml = {"inf": ".inf", "nan": ".nan"}.get(value, value)
    sentence = refusal(recipe(f"{field}: {in_yaml}\n"))
    assert sentence.startswith(f"{field} is ")
    assert reason in sentence


def test_a_number_that_yaml_takes_for_text_is_a_number(recipe):
    # YAML 1.1 wants a dot and a sign: 1.0e-5. Few people know.
    assert parse_flags(Config, [recipe("learning_rate: 1e-5\n")]).learning_rate == 1e-5


@pytest.mark.parametrize(
    "flags, resume",
    [
        ([], False),
        (["--resume"], True),
        (["--resume", "--steps=9"], True),
        (["--resume=true"], True),
        (["--resume", "false"], False),
        (["--resume=false"], False),
    ],
)
def test_a_boolean_flag_alone_means_true_and_false_can_be_said(flags, resume):
    assert parse_flags(Config, flags).resume is resume


@pytest.mark.parametrize(
    "text, resume", [("true", True), ("yes", True), ("false", False), ("no", False)]
)
def test_a_flag_overrides_the_boolean_of_a_recipe_both_ways(text, resume, recipe):
    file = recipe(f"resume: {text}\n")
    assert parse_flags(Config, [file]).resume is resume
    assert parse_flags(Config, [file, "--resume"]).resume is True
    assert parse_flags(Config, [file, "--resume=false"]).resume is False


def test_several_tasks_are_a_list_and_one_may_be_given_alone(recipe):
    one = parse_flags(EvalConfig, [recipe("task: gsm8k\n")])
    assert one.task == ["gsm8k"]
    two = parse_flags(EvalConfig, ["--task", "gsm8k", "math500"])
    assert two.task == ["gsm8k", "math500"]


# Names


@pytest.mark.parametrize("flag", ["--lerning_rate=1e-4", "--learning=1e-4"])
def test_an_unknown_or_abbreviated_flag_is_refused(flag):
    assert refusal(flag).startswith(f"unrecognized arguments: {flag}")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("clip_range: 0.2\n", "there is no field 'clip_range' (--help lists them)"),
        ("1: 2\n", "1 is 1: keys should be strings"),
        ("- steps\n", "is no YAML file of fields: it holds ['steps']"),
        ("", "is no YAML file of fields: it holds None"),
        ("steps: [\n", "is no YAML file of fields: while parsing"),
    ],
    ids=["unknown", "number", "list", "empty", "broken"],
)
def test_a_recipe_has_only_fields_of_the_configuration(text, sentence, recipe):
    assert sentence in refusal(recipe(text))


@pytest.mark.parametrize("path", ["missing.yaml", "tests", "tiny/model.safetensors"])
def test_a_recipe_that_cannot_be_read_is_named(path):
    assert refusal(f"--config={path}").startswith(f"--config {path} is no YAML file")


def test_help_has_every_field_with_its_sentence_and_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_flags(Config, ["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Config.model_fields.items():
        assert f"--{name}" in text
        assert f"{' '.join(field.description.split())} (default: " in text, name


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_of_the_repository_is_a_configuration(path):
    cfg = parse_flags(Config, [f"--config={path}"])
    find_objective(OBJECTIVES, cfg.objective, cfg.objective_args)


# objective_args


@pytest.mark.parametrize(
    "text",
    ["eps=0.4", "[eps=0.4]", "{eps: 0.4}", '{eps: "0.4"}'],
    ids=["text", "list", "mapping", "mapping of text"],
)
def test_objective_args_are_the_same_in_any_spelling_of_a_recipe(text, recipe):
    cfg = parse_flags(Config, [recipe(f"objective_args: {text}\n")])
    assert cfg.objective_args == {"eps": 0.4}
    assert isinstance(cfg.objective_args["eps"], float)


def test_objective_args_of_flags_are_those_of_a_recipe(recipe):
    from_flags = parse_flags(Config, ["--objective_args", "eps=0.4", "c_w=3"])
    assert from_flags.objective_args == {"eps": 0.4, "c_w": 3.0}
    file = recipe("objective_args: {eps: 0.4, c_w: 3}\n")
    assert parse_flags(Config, [file]) == from_flags


def test_objective_args_may_be_words():
    cfg = parse_flags(Config, ["--objective_args", "kl_estimator=k3"])
    assert cfg.objective_args == {"kl_estimator": "k3"}


@pytest.mark.parametrize("text", ["0.4", "eps", "[0.4]", "[{eps: 0.4}]", "null"])
def test_objective_args_that_name_nothing_are_refused(text, recipe):
    sentence = refusal(recipe(f"objective_args: {text}\n"))
    assert sentence.endswith("give name=value, such as eps=0.4")


def test_a_hyper_parameter_that_is_a_list_is_refused(recipe):
    sentence = refusal(recipe("objective_args: {eps: [1]}\n"))
    assert sentence.startswith("objective_args.eps")


@pytest.mark.parametrize(
    "default, given, value",
    [
        (1, "3", 3),
        (1, "1.5", None),
        (1, "inf", None),
        (True, "False", False),
        (False, "1", True),
        (True, "0.5", None),
        ("is", "3", None),
    ],
)
def test_a_hyper_parameter_is_used_as_it_was_given_or_refused(default, given, value):
    # int(1.5) would be 1, and bool("False") True.
    objective = replace(OBJECTIVES["grpo"], hyper_parameters={"cap": default})
    cfg = parse_flags(Config, ["--objective_args", f"cap={given}"])
    if value is None:
        with pytest.raises(Refused, match=f"takes cap={default}"):
            find_objective({"own": objective}, "own", cfg.objective_args)
    else:
        found = find_objective({"own": objective}, "own", cfg.objective_args)
        assert found.hyper_parameters == {"cap": value}
        assert type(found.hyper_parameters["cap"]) is type(default)


@pytest.mark.parametrize("value", ["wide", "inf", "nan"])
def test_a_hyper_parameter_that_is_no_finite_number_is_refused(value):
    cfg = parse_flags(Config, ["--objective_args", f"eps={value}"])
    with pytest.raises(Refused) as refused:
        find_objective(OBJECTIVES, "grpo", cfg.objective_args)
    assert str(refused.value) == f"objective_args has eps={value}: grpo takes eps=0.2"
