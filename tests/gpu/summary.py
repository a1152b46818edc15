"""summary.py FOLDER "STEP CODE SECONDS"...: what ./run gpu-test saw, as JSON on stdout.

Counts the tests in the JSON and XML files that each step left in FOLDER. A step's code is 0 where it passed, 2 where
this machine cannot run it, anything else where it failed. GPU, DRIVER and COMMIT come from the environment.
"""
import datetime
import glob
import json
import os
import sys
import xml.etree.ElementTree


def verdicts(folder, step):
    """passed, failed or skipped, for each test of a step."""
    for path in glob.glob(f"{folder}/{step}.*.json"):
        with open(path) as file:
            suites = json.load(file)["testsuites"]
        for test in (test for suite in suites for test in suite["testsuite"]):
            ran = test["result"] != "SKIPPED"
            yield "failed" if "failures" in test else "passed" if ran else "skipped"
    for path in glob.glob(f"{folder}/{step}.*.xml"):
        for test in xml.etree.ElementTree.parse(path).iter("testcase"):
            failed = test.find("failure") is not None or test.find("error") is not None
            yield "failed" if failed else "passed" if test.find("skipped") is None else "skipped"


def summary_of(folder, step, code, seconds):
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for verdict in verdicts(folder, step):
        counts[verdict] += 1
    verdict = {"0": "passed", "2": "skipped"}.get(code, "failed")
    if verdict == "passed" and counts["passed"] == 0:
        verdict = "skipped"
    if verdict == "failed" and counts["failed"] == 0:
        counts["failed"] = 1  # a program that died, or a finding of the sanitizer
    return {"step": step, "verdict": verdict, **counts, "seconds": int(seconds)}


folder, steps = sys.argv[1], sys.argv[2:]
json.dump({"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
           "commit": os.environ["COMMIT"], "gpu": os.environ["GPU"], "driver": os.environ["DRIVER"],
           "steps": [summary_of(folder, *step.split()) for step in steps]}, sys.stdout, indent=2)
print()
