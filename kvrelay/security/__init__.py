"""Identities and permissions inside the cluster: certificates with roles, and capabilities for
single transfers.
"""
