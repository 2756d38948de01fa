"""What deploy/terraform says, read by python-hcl2: no cloud is asked."""
