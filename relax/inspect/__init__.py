"""`relax inspect`: what files of rollouts would teach, before anything is trained on them."""
