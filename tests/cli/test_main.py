import io
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pagoda.base.errors import CapacityError, ConfigError, RequestError
from pagoda.cli import hints, models
from pagoda.cli import main as cli_main

ROOT = Path(__file__).parents[2]

COMMANDS = (
    *("run", "generate", "chat", "transcribe", "run-batch", "serve", "launch", "top", "plan", "doctor", "models"),
    "bench",
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli_main.main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize("given", ["--help", "--help serve", "-v -h models"])
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], given: str) -> None:
    code, out, _ = run(capsys, *given.split())
    assert code == 0
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "bench throughput", "bench latency", "bench startup", "models pull"])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0
    assert "Usage: pagoda" in out


@pytest.mark.parametrize("command", [[], ["models"], ["bench"]], ids=str)
def test_no_command_shows_the_help_and_nothing_else(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, err = run(capsys, *command)
    assert code == 2
    assert "Usage: pagoda" in out
    assert err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()[0]) == (0, "pagoda")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nope",), "No such command 'nope'"),
        (("generate", "--max-num-sequ", "3", "hi"), "--max-num-seqs"),
        (("generate", "--max-num-seqs", "three", "hi"), "--max-num-seqs"),
        (("plan", "--kv-cache-memory", "much"), "'much' is not a size"),
        (("models", "pull", "smollm2-136m"), "did you mean 'smollm2-135m'"),
        (("plan", "--model", "/no/such/folder"), "/no/such/folder does not exist"),
        (("plan", "--model", "x/y", "--source", "nowhere"), "source='nowhere'"),
        (("bench", "throughput", "--workload", "/no/such.json"), "workload /no/such.json cannot be read"),
        (("generate", "--system", "be kind", "hi"), "--system needs --chat"),
        (("generate", ""), "the prompt is empty"),
        (("serve", "--port", "99999"), "port=99999 must be in 0 .. 65535"),
        (("serve", "--port", "-1"), "port=-1 must be at least 0"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("pagoda: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("a setting\nis wrong"), 2, "pagoda: a setting is wrong\n"),
        (RequestError("a request is wrong"), 2, "pagoda: a request is wrong\n"),
        (CapacityError("too large"), 1, "pagoda: too large\n"),
        (ZeroDivisionError("oops"), 1, "pagoda: internal error: ZeroDivisionError: oops"),
        (ModuleNotFoundError("No module named 'zmq'", name="zmq"), 1, "pip install '.[serve]'` in a checkout"),
        (ModuleNotFoundError("No module named 'pagoda.x'", name="pagoda.x"), 1, "internal error: ModuleNotFoundError"),
    ],
)
def test_errors_by_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(models, "cached_folders", fail)
    assert run(capsys, "models", "list")[0] == code
    assert words in run(capsys, "models", "list")[2]
    with pytest.raises(type(error)):
        cli_main.main(["--debug", "models", "list"])


def test_interrupted_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "cached_folders", interrupt)
    assert run(capsys, "models", "list")[0] == 130


def test_help_imports_nothing_heavy() -> None:
    """`pagoda --help` must answer at once: its cost is its imports."""
    code = (
        "import sys\n"
        "from pagoda.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'huggingface_hub', 'starlette', 'gguf'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or None)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3  # seconds of CPU time; 0.25 is usual


def test_what_the_first_token_does_not_need_is_not_imported() -> None:
    """The imports of `pagoda run` are a fifth of the time until its first token."""
    code = (
        "import sys\n"
        "from pagoda.cli.main import make_app\n"
        "make_app('run')\n"
        "import pagoda.cli.generate, pagoda.cli.session, pagoda.cli.console, pagoda.llm\n"
        "late = {'httpcore', 'filelock', 'rich.console', 'PIL', 'av', 'zmq', 'aiohttp', 'pagoda.executors.fake'}\n"
        "late |= {'pagoda.cli.bench', 'pagoda.cli.serve', 'pagoda.cli.plan'}\n"
        "sys.exit(' '.join(sorted(late & set(sys.modules))) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_app_for_one_command_has_that_command_alone() -> None:
    assert list(typer.main.get_command(cli_main.make_app("plan")).commands) == ["plan"]  # type: ignore[attr-defined]
    everything = typer.main.get_command(cli_main.make_app())
    assert everything.commands.keys() == {*cli_main.COMMANDS, *cli_main.OF_MODELS, *cli_main.GROUPS, "completion"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("collect-env", "use pagoda doctor"),
        ("ls", "use pagoda list"),
        ("chat --quick hi", "no such option: --quick; use pagoda run MODEL 'a question'"),
        ("generate -c 4096 hi", "no such option: -c; use --max-model-len"),
        ("serve -ngl=99 -np 4", "all layers are on one device: --device; no such option: -np; use --max-num-seqs"),
        (
            "run -p hi --temp 0",
            "-p; the prompt is a word of its own: pagoda run MODEL 'a question'; no such option: --temp",
        ),
        ("bench serve --backend vllm", "No such option: --backend; leave it out: bench serve measures any server"),
        ("bench throughput --dataset-name random", "use --workload FILE"),
        ("serve x -dp 2 --no-such", "no such option: --no-such"),
        ("serve x -O3 -cc.mode=3 --no-such", "no such option: --no-such"),
        ("pull -hf no-such-model", "unknown model 'no-such-model'"),
        ("models show --hf-repo no-such-model", "unknown model 'no-such-model'"),
        ("rm -hfr no-such-model", "unknown model 'no-such-model'"),
        ("cp a b", "pagoda serve MODEL --served-model-name NAME"),
    ],
)
def test_commands_and_flags_of_other_programs_are_answered_with_the_way_that_works(
    capsys: pytest.CaptureFixture[str], line: str, way: str
) -> None:
    code, _, err = run(capsys, *line.split())
    assert code == 2
    assert way in err


def test_hints_name_commands_and_flags_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    reference = "".join((ROOT / "docs" / "reference" / name).read_text() for name in ("cli.md", "settings.md"))
    known = set(re.findall(r"--[a-z][\w-]+", reference + run(capsys, "run", "--help")[1])) | {"--version"}
    for way in (*hints.COMMANDS.values(), *hints.FLAGS.values()):
        assert set(re.findall(r"--[a-z][\w-]+", way)) - known == set(), way
        for command in re.findall(r"pagoda ((?:models |bench )?[a-z]\w*)", way):
            assert f"## pagoda {command}\n" in reference, way


def test_debug_may_follow_the_command() -> None:
    assert cli_main._general_first(["generate", "--debug", "--", "--verbose"]) == [
        "--debug",
        "generate",
        "--",
        "--verbose",
    ]
    assert cli_main._general_first(["-v", "serve", "m"]) == ["-v", "serve", "m"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("port: many", "Invalid value for '--port': 'many' is not an integer"),
        ("max_num_seqs: 0", "max_num_seqs=0 must be at least 1"),
        ("server_limits: {max_connections: -1}", "server_limits.max_connections=-1 must be at least 0"),
    ],
)
def test_a_bad_value_of_a_file_is_reported_with_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str, message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(setting)
    code, _, err = run(capsys, "serve", "--config", str(path))
    assert code == 2
    assert f"pagoda: --config {path}: {message}" in err


def test_a_bad_value_of_the_environment_is_reported_with_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_PORT", "99999999")
    assert "pagoda: PAGODA_PORT: port=99999999 must be in" in run(capsys, "serve")[2]
    assert run(capsys, "serve", "--port", "88888888")[2].startswith("pagoda: port=88888888 must be in")


def test_an_empty_prompt_says_which_word_was_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = run(capsys, "run", "hello")
    assert code == 2
    assert "the prompt on standard input is empty; hello is the model, a prompt would follow it" in err
