"""Workers as Ray actors. The only package that knows Ray, which places, starts, watches and stops workers and carries
no request.
"""
