"""What a training run is made of: plain classes that a runtime calls in order or deploys."""
