"""Who is who between the cluster's parts: certificates with roles, and capabilities for single
transfers.
"""
