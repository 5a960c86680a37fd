"""Run only where a control plane is given: kube-apiserver is in no package index (docs/notes.md)."""

import os

collect_ignore_glob = [] if os.environ.get("KUBEBUILDER_ASSETS") else ["test_*.py"]
