"""The command line: what it prints, what it writes, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hf_folders
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from herald_jax import checkpoint
from herald_jax.cli import main
from herald_jax.cli import platform as cli_platform
from herald_jax.cli.console import Refused
from herald_jax.cli.demo_questions import Maker
from herald_jax.engine.engine import EMBEDDED
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig
from herald_jax.selection import SELECTORS
from herald_jax.training import prose

CONFIG = ModelConfig(
    family="sdar",
    vocab_size=260,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    block_size=8,
    mask_token_id=1,
    stop_token_ids=(0,),
    exact_layers=1,
)
RUN = ["--max-new-tokens", "12", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("model")
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|end|>", "<|mask|>", *bytes_]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tiny"
    network = registry.build(CONFIG, jnp.dtype("float32"), nnx.Rngs(0))
    checkpoint.save(path, CONFIG, network, tokenizer=folder)
    return path


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Three requests, of which the second has a field that does not exist."""
    path = tmp_path / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "the quick brown fox"},
        {"id": "b", "prompt": "x", "n": 4},
        {"prompt_ids": [70, 71, 72], "max_new_tokens": 5},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def generate(model: Path, *arguments: object) -> int:
    return main(["generate", "--model", str(model), *RUN, *map(str, arguments)])


def test_one_prompt_gives_text_on_stdout_and_progress_on_stderr(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "--prompt", "hello") == 0
    plain = capsys.readouterr()
    assert "method: dense (dense fits the device" in plain.err
    assert "tokens: 12/12" in plain.err
    assert generate(model, "--prompt", "hello", "--stream") == 0
    assert capsys.readouterr().out == plain.out


def test_a_streamed_answer_is_whole_where_progress_goes_to_the_same_place(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "--prompt", "hello") == 0
    answer = capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from herald_jax.cli import main; sys.exit(main())"]
        + [str(each) for each in ("generate", "--model", model, *RUN, "--prompt", "hello")]
        + ["--stream"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=True,
    )
    assert answer in done.stdout
    assert "tokens: " not in done.stdout


@pytest.mark.parametrize("method", ["dense", "herald-draft"])
def test_json_summary_has_the_promised_keys(
    model: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "--prompt", "some words " * 8, "--method", method, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    wanted = "method budget model device batch blocks steps seconds tokens_per_second"
    wanted += " stall_fraction device_kv_bytes host_kv_bytes"
    assert set(wanted.split()) <= set(summary)
    assert summary["method"] == method
    assert (summary["host_kv_bytes"] > 0) == (method != "dense")
    assert summary["result"]["usage"] == {"prompt_tokens": 88, "completion_tokens": 12}


def test_rules_and_options_of_single_requests_reach_the_engine(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--rule", "llada2.1", "--threshold", 0.3, "--steps", 4, "--max-post-steps", 2]
    assert generate(model, "--prompt", "some words", *both, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rule"] == "llada2.1"
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": "x"}, {"prompt": "x", "threshold": 2}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    flags = ["--allow-mask", "--no-clamp-quota", "--compare", "ge", "--fallback", "leftmost"]
    assert generate(model, "--requests", path, *flags) == 1
    good, bad = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda r: r["id"])
    assert "error" not in good
    assert "request 1: threshold 2 cannot be used: give a number from 0 to 1" in bad["error"]


def test_requests_deliver_the_good_ones_and_name_the_unknown_field(
    model: Path, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, "--requests", requests) == 1
    captured = capsys.readouterr()
    results = {line["id"]: line for line in map(json.loads, captured.out.splitlines())}
    assert set(results) == {"a", "b", "2"}
    assert "'n' is unknown" in results["b"]["error"]
    assert results["b"]["finish_reason"] == "error"
    assert results["a"]["finish_reason"] in ("stop", "length")
    assert results["2"]["usage"]["completion_tokens"] <= 5
    assert set(results["a"]) == {"id", "text", "token_ids", "finish_reason", "usage", "timing"}


def test_stream_deltas_joined_are_the_text(
    model: Path, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chunks hold what is new and never the text so far (NVIDIA/TensorRT-LLM#3280)."""
    assert generate(model, "--requests", requests, "--stream", "--max-new-tokens", 30) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    results = {line["id"]: line for line in lines if "finish_reason" in line}
    for name in ("a", "2"):
        deltas = [line for line in lines if line["id"] == name and "delta" in line]
        assert "".join(delta["delta"] for delta in deltas) == results[name]["text"]
        joined = [token for delta in deltas for token in delta["token_ids"]]
        assert joined == results[name]["token_ids"]
    assert len([line for line in lines if line["id"] == "a" and "delta" in line]) > 1


def test_output_resumes(
    model: Path, requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    done = {"id": "a", "text": "kept", "finish_reason": "stop"}
    output.write_text(json.dumps(done) + '\n{"id": "2", "te')
    arguments = ["--requests", requests, "--output", output, "--json"]
    assert generate(model, *arguments) == 1
    captured = capsys.readouterr()
    assert "1 of 3 requests are in" in captured.err
    assert "cut off" in captured.err
    assert json.loads(captured.out)["skipped"] == 1
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[0] == done
    assert sorted(line["id"] for line in lines) == ["2", "a", "b"]
    # Again, without the request that fails: nothing is left to do.
    requests.write_text("".join(requests.read_text().splitlines(keepends=True)[:1]))
    before = output.read_text()
    assert generate(model, *arguments) == 0
    assert output.read_text() == before


def test_interruption_keeps_what_is_finished(model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": "word " * 10}) for _ in range(4000)]
    source.write_text("\n".join(lines))
    arguments = ["generate", "--model", model, *RUN, "--requests", source, "--output", output]
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; from herald_jax.cli import main; sys.exit(main())"]
        + [str(argument) for argument in [*arguments, "--max-batch", 2]],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 120
        while not (output.exists() and output.stat().st_size):
            assert time.monotonic() < deadline, "no result within 120 s"
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert re.search(rf"interrupted: {len(kept)} of 4000 results are kept in", said)
    assert "Traceback" not in said


WRONG = [
    (["generate"], "exactly one of --prompt, --prompt-file and --requests"),
    (["generate", "--prompt", "a", "--requests", "f"], "exactly one of"),
    (["generate", "--prompt", ""], "--prompt is empty"),
    (["generate", "--prompt-file", "absent.txt"], "--prompt-file absent.txt cannot be read"),
    (["generate", "--requests", "absent.jsonl"], "--requests absent.jsonl cannot be read"),
    (["generate", "--requests", "bad.jsonl"], "bad.jsonl line 2 is not JSON"),
    (["generate", "--requests", "list.jsonl"], "list.jsonl line 1 is not a JSON object"),
    (["generate", "--requests", "twice.jsonl"], "line 2 has the id 'a' of line 1"),
    (["generate", "--requests", "empty.jsonl"], "holds no request"),
    (["generate", "--prompt", "a", "--output", "list.jsonl"], "list.jsonl line 1 is not a result"),
    (["generate", "--prompt", "a", "--output", "no/dir.jsonl"], "--output no/dir.jsonl"),
    (["generate", "--prompt", "a", "--method", "magic"], "--method 'magic' is unknown: use one of"),
    (["generate", "--prompt", "a", "--budget", "0"], "--budget 0 is outside (0, 1]"),
    (["generate", "--prompt", "a", "--budget-tokens", "0"], "--budget-tokens 0 selects nothing"),
    (["generate", "--prompt", "a", "--budget", "x"], "--budget"),
    (["generate", "--prompt", "a", "--budget", "1", "--budget-tokens", "9"], "exclude each other"),
    (["generate", "--prompt", "a", "--steps", "4", "--threshold", "1"], "exclude each other"),
    (
        ["generate", "--prompt", "a", "--rule", "magic"],
        "--rule 'magic' is unknown: use one of sdar",
    ),
    (["generate", "--prompt", "a", "--strategy", "x"], "--strategy 'x' is unknown: use one of dyn"),
    (["generate", "--prompt", "a", "--edit-threshold", "2"], "--edit-threshold 2.0"),
    (["generate", "--prompt", "a", "--small-block", "0"], "--small-block 0"),
    (["generate", "--prompt", "a", "--device-memory", "80 apples"], "--device-memory '80 apples'"),
    (["generate", "--prompt", "a", "--host-memory", "0GB"], "--host-memory '0GB'"),
    (["generate", "--prompt", "a", "--dtype", "int8"], "--dtype"),
    (["generate", "--prompt", "a", "--threads", "0"], "--threads"),
    (["generate", "--prompt", "a", "--model", "nowhere"], "nowhere does not exist"),
    (["generate", "--prompt", "a", "--temperature", "-1"], "--temperature"),
    (["generate", "--prompt", "a", "--temperature", "inf"], "--temperature"),
    (["generate", "--prompt", "a", "--temperature", "nan"], "--temperature"),
    (["generate", "--prompt", "a", "--temperature", "1e38"], "--temperature"),
    (["generate", "--prompt", "a", "--top-k", "99999999999"], "--top-k"),
    (["generate", "--prompt", "a", "--seed", "99999999999"], "--seed"),
    (["generate", "--prompt", "a", "--model", ""], "--model is empty"),
    (["generate", "--prompt", "\udcff"], "--prompt is not UTF-8 text"),
    (["generate", "--prompt", "a", "--stop", "\udcff"], "--stop is not UTF-8 text"),
    (["generate", "--prompt", "a", "--output", "."], "--output . is not a regular file"),
    (["generate", "--requests", "bad.jsonl", "--output", "bad.jsonl"], "bad.jsonl"),
    (["generate", "--nonsense"], "--nonsense"),
    (["frobnicate"], "frobnicate"),
    (["plan", "--model", "nowhere"], "nowhere"),
    (["plan", "--model", "list.jsonl"], "list.jsonl is not a JSON object"),
    (["plan", "--model", "scaled.json"], "rope_scaling must be an object"),
    (["plan", "--model", "deep.json"], "deep.json cannot be read as JSON"),
    (["plan", "--model", ""], "--model is empty"),
    (["plan", "--max-batch", "1" + "0" * 20], "--max-batch"),
    (["plan", "--max-context", "1" + "0" * 20], "--max-context"),
    (["plan", "--budget-tokens", "1" + "0" * 20], "--budget-tokens"),
    (["plan", "--host-memory", "much"], "--host-memory 'much'"),
    (["convert", "absent", "out"], "SRC absent is not a folder"),
    (["convert", ".", "../out"], "no config.json"),
    (["convert", ".", "out"], "out and . lie in one another"),
    (["convert", ".", ""], "OUT is empty"),
    (["convert", "", "out"], "SRC is empty"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_wrong_use_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    Path("list.jsonl").write_text("[1]\n")
    Path("twice.jsonl").write_text('{"id": "a", "prompt": "a"}\n{"id": "a", "prompt": "b"}\n')
    Path("empty.jsonl").write_text("\n")
    Path("scaled.json").write_text('{"model_type": "sdar", "rope_scaling": "x"}')
    Path("deep.json").write_text("[" * 100_000)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "long " * 200], "over the model's context of 512"),
        (["--prompt", "long " * 20, "--max-context", "64"], "--max-context 64"),
        (["--prompt", "a", "--device-memory", "10kB"], "raise --device-memory"),
        (
            ["--prompt", "a" * 99, "--method", "window", "--host-memory", "1kB"],
            "raise --host-memory",
        ),
        (["--prompt", "a", "--steps", "9"], "--steps 9 is more than the block size 8"),
        (["--prompt", "a", "--method", "window", "--exact-layers", "2"], "--exact-layers 2"),
        (["--prompt", "a", "--chat"], "no chat template"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    model: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, *arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_plan_lists_every_method(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--device-memory", "1GB", "--host-memory", "1GB", "--max-context", "512"]
    assert main(["plan", "--model", str(model), *limits, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in report["methods"]}
    assert set(rows) == {"dense", *SELECTORS}
    assert report["auto"]["method"] == "dense"
    assert rows["dense"]["host_bytes"] == 0
    keys = "weights exact_kv pools prefill workspace".split()  # noqa: SIM905
    for row in rows.values():
        assert row["device_bytes"] == sum(row[key] for key in keys)
        assert row["fits"] == (row["largest_batch"] >= report["max_batch"])
    assert main(["plan", "--model", str(model / "config.json"), *limits]) == 0
    assert "largest batch" in capsys.readouterr().out


def test_doctor_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["attention"]["agrees"]
    assert report["bandwidth"]["read_gb_per_s"] > 0
    assert report["bandwidth"]["copy_gb_per_s"] > 0
    assert report["instruction_set"]["chosen"] in report["instruction_set"]["available"]
    assert report["threads"]["count"] >= 1
    assert report["prefetch"]["setting"] == "none"
    assert report["prefetch"]["source"] == "HERALD_PREFETCH"
    memory = report["host_memory"]
    assert 0 < memory["kv_room"] < memory["available"]


def test_convert_makes_a_checkpoint_that_generates(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    _, network = checkpoint.load(model)
    tensors = hf_folders.tensors_of(network)
    save_file(tensors, source / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_bytes((model / name).read_bytes())
    assert main(["convert", str(source), str(out), "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(tensors)
    assert main(["convert", str(source), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    texts = []
    for path in (model, out):
        assert generate(path, "--prompt", "hello") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hf_folders.write(tmp_path / "hf")
    monkeypatch.setattr(checkpoint.Writer, "put", interrupt)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "out")]) == 130
    said = capsys.readouterr().err
    assert said == f"interrupted: nothing was written to {tmp_path / 'out'}\n"
    assert os.listdir(tmp_path) == ["hf"]


def test_help_is_quick_and_names_every_selector(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from herald_jax.cli import main; main(['--help']); "
    code += "assert 'jax' not in sys.modules, 'help imports JAX'"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    for command in ("generate", "demo", "convert", "plan", "doctor"):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "herald " + command in text
        if command == "generate":
            assert all(name in text for name in SELECTORS)


def test_platform_list_without_cpu_is_mended_but_the_cpu_is_no_substitute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    running = f"would run on the {jax.default_backend()} backend"
    with pytest.raises(Refused, match=f"JAX_PLATFORMS=tpu gives no device: .* {running}"):
        cli_platform.prepare_platform()
    assert os.environ["JAX_PLATFORMS"] == "tpu,cpu"
    assert "lacks cpu" in capsys.readouterr().err


def test_an_unknown_instruction_set_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["host_kernels.cpu"], "_environment_read", False)
    monkeypatch.setenv("HERALD_ISA", "foo")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("error: HERALD_ISA: instruction set 'foo'")


def test_an_unexpected_error_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise AttributeError("no such thing\nat all")

    monkeypatch.setattr(sys.modules["herald_jax.cli.doctor"], "examine", fail)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: unexpected AttributeError: no such thing (HERALD_TRACEBACK=1")
    assert said.count("\n") == 1
    monkeypatch.setenv("HERALD_TRACEBACK", "1")
    assert main(["doctor"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_stdout_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", "from herald_jax.cli import main; raise SystemExit(main(['plan']))"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_platform_that_is_not_there_is_refused() -> None:
    code = "import sys; from herald_jax.cli import main; sys.exit(main(['plan']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "rocm"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "JAX_PLATFORMS=rocm gives no device" in done.stderr
    assert "Traceback" not in done.stderr


def test_device_memory_becomes_the_size_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    cli_platform.limit_arena(80_000_000_000, 160_000_000_000)
    assert float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == 0.5
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "default"
    with pytest.raises(Refused, match="--device-memory"):
        cli_platform.limit_arena(80_000_000_000, 80_000_000_000)


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="the embedded model is not in this checkout")
def test_demo_reports_all_methods(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo itself over shorter documents, which the real lengths would make slow."""
    module = sys.modules["herald_jax.cli.demo"]
    sizes = {"SHORT_TOKENS": 384, "CROSSING_TOKENS": 256, "LONG_TOKENS": 512, "QUESTIONS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)
    assert main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    crossing, far = report["crossing"], report["long_document"]
    assert [row["kind"] for row in report["questions"]] == ["prose", "table"]
    assert [row["kind"] for row in crossing["questions"]] == ["passage", "several"]
    for source in (report, far):
        assert source["herald"]["device_kv_bytes"] < source["dense"]["device_kv_bytes"]
        assert source["herald"]["host_kv_bytes"] > 0 == source["dense"]["host_kv_bytes"]
        assert not source["dense"]["errors"] + source["herald"]["errors"]
    for name in ("dense", "herald", "drafted"):
        for rows, correct in (
            (report["questions"], report[name]["correct"]),
            (far["questions"], far[name]["correct"]),
            (crossing["questions"], crossing[f"{name}_correct"]),
        ):
            right = [row[name] == row["answer"] for row in rows]
            assert [row[f"{name}_correct"] for row in rows] == right
            assert correct == sum(right)
            # Long answers are where a selection made beforehand may fail.
            assert all(right) or (name != "dense" and rows is crossing["questions"])
        assert (report[name]["total"], far[name]["total"]) == (2, 1)
    assert crossing["total"] == 2
    assert report["document_tokens"] < 384
    assert 440 < far["prompt_tokens"] < 512


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="the embedded model is not in this checkout")
@pytest.mark.parametrize("seed", [0, 1])
def test_demo_answers_lie_where_it_says(seed: int) -> None:
    """Which blocks hold an answer, by decoding the prompt and encoding it with its answer."""
    backend = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    make = Maker(lambda text: backend.encode(text).ids, 32, seed)
    short = make.short(512, 6)
    assert [item.kind for item in short.asked] == ["prose"] * 3 + ["table"] * 3
    assert [item.blocks for item in short.asked] == [2, 1, 1] * 2
    long = [make.item("passage", 512, blocks=2), make.item("several", 512, blocks=3)]
    assert long[0].blocks >= 2
    assert long[1].blocks >= 3
    for item in [*short.asked, *long, make.item("needle", 512)]:
        text = f"{backend.decode(item.prompt)} {item.answer}"
        assert item.question in text
        length = len(backend.encode(text).ids)
        assert length <= 512
        assert (length - 1) // 32 - len(item.prompt) // 32 + 1 == item.blocks, item.question
        if item.kind != "several":
            assert item.answer in text[: text.rindex("Question: ")]
    with pytest.raises(Refused, match="no needle of 256 tokens has an answer of 4 blocks"):
        make.item("needle", 256, blocks=4)


def test_demo_without_prose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(held_out: bool = False) -> tuple[str, ...]:
        raise prose.NoProse("no prose: here")

    monkeypatch.setattr(prose, "sentences", none)
    with pytest.raises(Refused, match="no prose: here"):
        Maker(lambda text: [], 32, 0)
