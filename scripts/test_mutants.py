#!/usr/bin/env python3
"""A planted survivor is found, and no mutant of a line that did not change is tried: scripts/mutants.py --changed."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent / "mutants.py"
MANIFEST = '[package]\nname = "planted"\nversion = "0.0.0"\nedition = "2024"\n'
BEFORE = """pub fn untested(a: u32, b: u32) -> u32 {
    a * b
}
"""
CHANGED = """
pub fn most(a: u32, b: u32) -> u32 {
    if a > b { a } else { b }
}
"""
TESTS = """
#[cfg(test)]
mod tests {
    #[test]
    fn the_larger_is_the_most() {
        assert_eq!(super::most(3, 1), 3);%s
    }
}
"""


class Changed(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.source = self.root / "planted/src/lib.rs"
        self.source.parent.mkdir(parents=True)
        (self.root / "Cargo.toml").write_text('[workspace]\nmembers = ["planted"]\nresolver = "3"\n')
        (self.root / "planted/Cargo.toml").write_text(MANIFEST)
        (self.root / ".gitignore").write_text("/target\nCargo.lock\n")
        self.source.write_text(BEFORE)
        for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "planted: begin"]):
            identity = ["-c", "user.name=planted", "-c", "user.email=planted@localhost"]
            subprocess.run(["git", *identity, *command], cwd=self.root, check=True)

    def mutants(self, *more):
        command = [sys.executable, SCRIPT, "--changed", "HEAD", "--watch", "planted/src/=planted",
                   "--work", "target/mutants", *more]
        done = subprocess.run(command, cwd=self.root, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr

    def test_a_planted_survivor_is_found(self):
        self.source.write_text(BEFORE + CHANGED + TESTS % "")
        code, told = self.mutants()
        self.assertEqual(code, 1, told)
        # Where the second is larger, nothing looks.
        self.assertIn("planted/src/lib.rs:6: survived: a > b -> true", told)
        self.assertNotIn("a * b", told)
        self.assertEqual(self.source.read_text(), BEFORE + CHANGED + TESTS % "")

    def test_what_tests_look_at_has_no_survivor(self):
        more = "\n        assert_eq!(super::most(1, 3), 3);"
        self.source.write_text(BEFORE + CHANGED.replace("a > b", "b < a") + TESTS % more)
        code, told = self.mutants()
        # Where both are equal, either is the most.
        self.assertIn("survived: b < a -> (b) <= (a)", told)
        self.assertEqual((code, told.count("survived:")), (1, 1), told)
        self.assertIn(" caught", told)

    def test_what_there_is_no_time_for_is_said(self):
        self.source.write_text(BEFORE + CHANGED + TESTS % "")
        code, told = self.mutants("--seconds", "0")
        self.assertEqual(code, 0, told)
        self.assertRegex(told, r"planted: \d+ mutants are left out: its tests were not compiled in 0 s")

    def test_nothing_changed_is_nothing_to_do(self):
        code, told = self.mutants()
        self.assertEqual(code, 0, told)
        self.assertIn("mutants of 0 lines that differ from HEAD: none", told)


if __name__ == "__main__":
    unittest.main()
