"""Deployments as data: ``reading`` the files, ``placing`` engines on hosts, ``rendering`` what to run."""
