"""What the image is made of: locked with hashes (lock.py), listed (bill.py), and under which licences (licences.py).

`make lock` chooses versions anew; `make sbom` lists what is locked.
"""
