"""A run as Kubernetes objects: pure rendering from the plan, the cluster profile and the options of `submit`."""
