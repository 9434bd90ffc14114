"""Built-in reward functions, by what they rate; function.py has their names. Each is a user's function in form, and would run as one."""
