"""The chart in deploy/helm, rendered by Helm 4's own library (PyPI, helm-python-sdk)."""

import os
import re
import unittest

import yaml
from helm_python import errors
from helm_python.chart import Chart, lint

ROOT = os.path.join(os.path.dirname(__file__), "../..")
CHART = os.path.join(ROOT, "deploy/helm/cellar")
LEAST = {"image": {"repository": "registry.example/cellar"}, "model": "OWNER/NAME"}
ALL = {
    **LEAST,
    "auth": {"existingSecret": "keys"},
    "tier": {"url": "redis://redis:6379", "existingSecret": "tier"},
    "kvEvents": {"enabled": True},
    "metrics": {"serviceMonitor": True},
    "extraArgs": ["--step-ms", "100"],
    "drain": 45,
    "endpointsDelay": 7,
}


def rendered(values):
    """The objects of a release, by kind and name."""
    with Chart.load(CHART) as chart:
        files = chart.render(values=values, name="demo", namespace="llm")
    objects = {}
    for name, text in files.items():
        if name.endswith(".yaml"):
            for one in filter(None, yaml.safe_load_all(text)):
                objects[one["kind"], one["metadata"]["name"]] = one
    return objects


def read(path):
    with open(os.path.join(ROOT, path)) as file:
        return file.read()


class TheChart(unittest.TestCase):
    def test_it_has_no_faults(self):
        said = lint(CHART, values=LEAST)
        self.assertEqual(said["errors"], [])
        self.assertEqual([one["error"] for one in said["messages"]], ["icon is recommended"])

    def test_it_is_of_this_version(self):
        version = re.search(r'^version = "(.+)"$', read("Cargo.toml"), re.M)[1]
        with Chart.load(CHART) as chart:
            self.assertEqual(chart.metadata["appVersion"], version)

    def test_the_least_is_a_set_of_servers(self):
        objects = rendered(LEAST)
        self.assertEqual(set(objects), {
            ("StatefulSet", "demo-cellar"), ("Service", "demo-cellar"), ("Service", "demo-cellar-pods"),
        })
        pod = objects["StatefulSet", "demo-cellar"]["spec"]["template"]["spec"]
        [server] = pod["containers"]
        self.assertIn("--no-auth", server["args"])
        self.assertNotIn("--tier", server["args"])
        self.assertNotIn("initContainers", pod)
        for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
            self.assertEqual(server[probe]["httpGet"], {"path": path, "port": "http"})
        for service in (objects["Service", "demo-cellar"], objects["Service", "demo-cellar-pods"]):
            labels = objects["StatefulSet", "demo-cellar"]["spec"]["template"]["metadata"]["labels"]
            self.assertLessEqual(service["spec"]["selector"].items(), labels.items())

    def test_everything_is_connected(self):
        objects = rendered(ALL)
        spec = objects["StatefulSet", "demo-cellar"]["spec"]
        pod = spec["template"]["spec"]
        [server], [key] = pod["containers"], pod["initContainers"]
        volumes = {one["name"] for one in pod["volumes"]}
        volumes |= {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
        for container in (server, key):
            mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
            self.assertLessEqual(mounts.keys(), volumes)
            paths = [word for word in container.get("args", container.get("command")) if word.startswith("/")]
            for path in paths:
                self.assertTrue(any(path.startswith(mount + "/") for mount in mounts.values()), path)
        # A pod outlives the requests that it drains, and the proxies that still send it some.
        self.assertGreater(pod["terminationGracePeriodSeconds"], 45 + 7)
        self.assertEqual(server["lifecycle"]["preStop"], {"sleep": {"seconds": 7}})
        self.assertEqual(server["args"][-2:], ["--step-ms", "100"])
        ports = {one["name"] for one in server["ports"]}
        for one in objects.values():
            if one["kind"] == "Service":
                self.assertLessEqual({port["targetPort"] for port in one["spec"]["ports"]}, ports)
        monitor = objects["ServiceMonitor", "demo-cellar"]["spec"]
        pods = objects["Service", "demo-cellar-pods"]["metadata"]["labels"]
        self.assertLessEqual(monitor["selector"]["matchLabels"].items(), pods.items())

    def test_the_program_has_its_flags(self):
        flags = read("docs/flags.md")
        start = flags.index("cellar serve")
        words = rendered(ALL)["StatefulSet", "demo-cellar"]["spec"]["template"]["spec"]["containers"][0]["args"]
        # These are in programs with a feature alone, and the page has those of the default ones.
        of_features = {"--tier", "--tier-key-file", "--kv-events", "--kv-events-replay"}
        for word in words + ["--no-auth"]:
            if word.startswith("--") and word not in of_features:
                self.assertRegex(flags[start:], rf"{word}\b")

    def test_what_cannot_be_is_refused(self):
        for change, wanted in (
            ({"model": ""}, "/model"),
            ({"image": {"repository": ""}}, "/image/repository"),
            ({"tier": {"url": "redis://redis"}}, "/tier/existingSecret"),
            ({"tier": {"url": "http://redis", "existingSecret": "tier"}}, "/tier/url"),
            ({"parallel": 0}, "/parallel"),
            ({"extraArgs": "--step-ms 100"}, "/extraArgs"),
        ):
            with self.assertRaisesRegex(errors.HelmError, wanted):
                rendered({**LEAST, **change})


if __name__ == "__main__":
    unittest.main(verbosity=2)
