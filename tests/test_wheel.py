"""The steps of the Dockerfile, without its machine: build the wheel, install it, serve without a compiler on the path.

Dependencies are borrowed from the tests' environment, so nothing is fetched. No image is built: that takes Docker.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pagoda.base.server_config import ServerTimeouts
from pagoda.kernels.native.threads import cpu_flags
from pagoda.kernels.native.variants import runnable
from pagoda.loading.fetch_wheel import default_cache_dir
from pagoda.server.pages.files import PAGE_PATHS, STATIC
from pagoda.server.routing import HEALTH_PATHS
from tests.cached_models import cached_model
from tests.kernels.test_variants import ASSEMBLES, foreign, instructions

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = Path(f"{sys.prefix}-wheel") / "bin"
IMAGE = "/opt/pagoda"

needs_tools = pytest.mark.skipif(
    not (TOOLS / "auditwheel").exists(), reason=f"no {TOOLS}; install it with: make .venv-wheel/.installed"
)
builds_a_wheel = pytest.mark.slow
"""Both cores compile for two minutes. What an editable install, the containers and the choice of a variant need is
tested without."""


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, each as its word and its arguments."""
    lines = [line for line in (REPOSITORY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", "")
    return [(word, rest.strip()) for word, rest in (line.split(None, 1) for line in whole.splitlines() if line)]


def only(instruction: str) -> str:
    """Return the arguments of the last instruction of this kind."""
    return [rest for word, rest in dockerfile() if word == instruction][-1]


def compose_service() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]["pagoda"]


def kubernetes(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((REPOSITORY / "deploy" / "kubernetes.yaml").read_text())
    return next(document for document in documents if document["kind"] == kind)


def pod() -> dict[str, Any]:
    return kubernetes("Deployment")["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the RUN instructions that build and install; return what becomes /opt/pagoda."""
    if not runnable(cpu_flags()):
        pytest.skip("wheels with kernels are for x86-64")
    source, target, borrowed = (tmp_path_factory.mktemp(name) for name in ("src", "opt", "borrowed"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "pagoda" not in entry.name:
            (borrowed / entry.name).symlink_to(entry)
    (source / "constraints.txt").symlink_to(REPOSITORY / "constraints.txt")
    variants = " ".join(dict.fromkeys([runnable(cpu_flags())[0].name, "avx2"]))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "VARIANTS": variants,
        "DIST": str(source / "dist"),
    }
    for word, step in dockerfile():
        if word != "RUN" or step.startswith(("apt-get", "useradd")):
            continue
        builds = step.startswith("make")  # which may have to renew its tools; the rest is here
        done = subprocess.run(
            step.replace(IMAGE, str(target)),
            shell=True,
            cwd=REPOSITORY if builds else source,
            env=environment if builds else {**environment, "PIP_NO_INDEX": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{step}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        if step == f"python -m venv {IMAGE}":
            (site,) = target.glob("lib/python3*/site-packages")
            (site / "borrowed.pth").write_text(str(borrowed))
            for old in site.glob("setuptools*"):  # Python 3.11 brings one that is too old for torch
                shutil.rmtree(old)
    assert len(list((source / "dist").iterdir())) == 1
    (source / "dist").rename(target / "dist")
    return target


@needs_tools
@builds_a_wheel
def test_the_wheel_is_for_every_python_and_for_old_systems(installed: Path) -> None:
    (wheel,) = (installed / "dist").iterdir()
    found = re.fullmatch(r"pagoda_llm-[\d.]+-py3-none-manylinux_2_(\d+)_x86_64\.whl", wheel.name)
    assert found, wheel.name
    assert int(found[1]) <= 28, "what torch's wheels need; see native/glibc_2_28.h"
    names = zipfile.ZipFile(wheel).namelist()
    assert "pagoda/py.typed" in names
    assert not [name for name in names if not name.startswith(("pagoda/", "pagoda_llm-"))]


@needs_tools
@builds_a_wheel
def test_installed_kernels_have_no_instruction_beyond_their_set(installed: Path) -> None:
    libraries = sorted(installed.glob("lib/python3*/site-packages/pagoda/kernels/native/prebuilt/*.so"))
    assert len(libraries) == len({runnable(cpu_flags())[0].name, "avx2"})
    for path in libraries:
        assert not foreign(instructions(path), ASSEMBLES[path.stem.removeprefix("kernels-")])[:5]


@needs_tools
@builds_a_wheel
def test_an_installed_server_answers_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    """As the image starts it: entry point, command and health check of the Dockerfile, SIGTERM at the end."""
    cached_model("smollm2-135m")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"PATH": f"{installed}/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*json.loads(only("ENTRYPOINT")), *json.loads(only("CMD")), "--port", str(port)]
    command += ["--cache-dir", str(default_cache_dir()), "--max-model-len", "512"]
    command[0] = f"{installed}/bin/{command[0]}"
    health = json.loads(only("HEALTHCHECK").partition(" CMD ")[2])
    health = [f"{installed}/bin/{health[0]}", *(word.replace(":8000", f":{port}") for word in health[1:])]
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while subprocess.run(health, env=environment, cwd=tmp_path, capture_output=True, check=False).returncode:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["text"]
        for path in PAGE_PATHS:
            assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()
    assert "compil" not in log.read_text()
    assert not (tmp_path / ".cache" / "pagoda" / "native").exists()
    assert subprocess.run(health, env=environment, cwd=tmp_path, capture_output=True, check=False).returncode


@needs_tools
def test_an_editable_install_compiles_nothing_and_comes_last_on_the_path(tmp_path: Path) -> None:
    """So `make demo` needs no CMake, and another checkout on PYTHONPATH is the one that runs."""
    program = "import sys; from scikit_build_core.build import build_editable; build_editable(sys.argv[1])"
    environment = {"PATH": "", "HOME": str(tmp_path)}  # no compiler
    command = [TOOLS / "python", "-c", program, tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    (path,) = (name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name)
    assert path.endswith(".pth")
    assert zipfile.ZipFile(wheel).read(path).decode().split() == [str(REPOSITORY)]


@needs_tools
def test_every_file_of_the_package_is_in_the_wheel_and_in_the_source_distribution(tmp_path: Path) -> None:
    """Pages and templates, too, which no import would miss."""
    program = (
        "import sys; from scikit_build_core.build import build_sdist, build_wheel; build_sdist(sys.argv[1]); "
        "build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [TOOLS / "python", "-c", program, tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [file.relative_to(REPOSITORY) for file in (REPOSITORY / "pagoda").rglob("*") if file.is_file()]
    expected = {str(file) for file in files if file.suffix != ".so" and "__pycache__" not in file.parts}
    assert f"{STATIC.relative_to(REPOSITORY)}/dashboard/main.js" in expected
    assert expected <= set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sources:
        assert expected <= {name.partition("/")[2] for name in sources.getnames()}


@needs_tools
def test_files_for_containers_follow_their_schemas() -> None:
    for command in (
        "hadolint --ignore DL3008 --ignore DL3059 Dockerfile",  # unpinned packages of Debian, several RUN
        "kubernetes-validate --strict deploy/kubernetes.yaml",
        "check-jsonschema --builtin-schema vendor.compose-spec compose.yaml",
    ):
        first, *rest = shlex.split(command)
        done = subprocess.run([TOOLS / first, *rest], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_containers_agree_with_the_image() -> None:
    (container,) = pod()["containers"]
    volume = only("VOLUME")
    user = int(only("USER"))
    assert container["volumeMounts"][0]["mountPath"] == volume
    assert compose_service()["volumes"] == [f"models:{volume}"]
    assert pod()["securityContext"]["runAsUser"] == user != 0
    assert container["ports"][0]["containerPort"] == int(only("EXPOSE"))
    start = json.loads(only("CMD"))
    assert container["args"][: len(start)] == compose_service()["command"][: len(start)] == start


def test_probes_ask_routes_that_need_no_key() -> None:
    (container,) = pod()["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert probes == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    assert HEALTH_PATHS.issuperset(probes.values())
    assert any(path in only("HEALTHCHECK") for path in HEALTH_PATHS)


def test_containers_wait_for_a_drain() -> None:
    drain_s = ServerTimeouts().drain_timeout_s
    (container,) = pod()["containers"]
    assert pod()["terminationGracePeriodSeconds"] > container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain_s
    assert float(compose_service()["stop_grace_period"].removesuffix("s")) > drain_s
