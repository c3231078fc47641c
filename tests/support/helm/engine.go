package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

const (
	kubeVersion  = "v1.31.0"
	deepestCalls = 1000
)

// render executes all templates, partials aside, as Helm's engine does: missing keys are empty.
func (c *chart) render(given options, values map[string]interface{}) (map[string]string, error) {
	name, _ := c.metadata["name"].(string)
	metadata := map[string]interface{}{}
	for key, value := range c.metadata {
		metadata[strings.ToUpper(key[:1])+key[1:]] = value
	}
	top := map[string]interface{}{
		"Values": values,
		"Chart":  metadata,
		"Files":  c.files,
		"Release": map[string]interface{}{
			"Name": given.release, "Namespace": given.namespace, "Service": "Helm",
			"Revision": 1, "IsInstall": true, "IsUpgrade": false,
		},
		"Capabilities": map[string]interface{}{
			"KubeVersion": map[string]interface{}{"Version": kubeVersion, "Major": "1", "Minor": "31"},
			"APIVersions": apiVersions{"v1": true, "apps/v1": true, "autoscaling/v2": true, "policy/v1": true},
		},
	}
	all := template.New("chart").Option("missingkey=zero")
	all.Funcs(functions(all))
	for source, text := range c.sources {
		if _, err := all.New(path.Join(name, source)).Parse(text); err != nil {
			return nil, fmt.Errorf("parse error at (%s): %w", path.Join(name, source), err)
		}
	}
	rendered := map[string]string{}
	for source := range c.sources {
		base := path.Base(source)
		if strings.HasPrefix(base, "_") {
			continue
		}
		full := path.Join(name, source)
		top["Template"] = map[string]interface{}{"Name": full, "BasePath": path.Join(name, "templates")}
		var text strings.Builder
		if err := all.ExecuteTemplate(&text, full, top); err != nil {
			return nil, err
		}
		key := full
		if base == "NOTES.txt" {
			key = base
		}
		rendered[key] = strings.ReplaceAll(text.String(), "<no value>", "")
	}
	return rendered, nil
}

// functions has sprig's functions and those that Helm adds; Helm removes the two that read the environment.
func functions(all *template.Template) template.FuncMap {
	found := sprig.TxtFuncMap()
	delete(found, "env")
	delete(found, "expandenv")
	depth := map[string]int{}
	found["include"] = func(name string, data interface{}) (string, error) {
		if depth[name] >= deepestCalls {
			return "", fmt.Errorf("rendering template has a nested reference name: %s", name)
		}
		depth[name]++
		defer func() { depth[name]-- }()
		var text strings.Builder
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	found["tpl"] = func(text string, data interface{}) (string, error) {
		copied, err := all.Clone()
		if err != nil {
			return "", err
		}
		parsed, err := copied.New("tpl").Parse(text)
		if err != nil {
			return "", err
		}
		var result strings.Builder
		err = parsed.Execute(&result, data)
		return strings.ReplaceAll(result.String(), "<no value>", ""), err
	}
	found["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return value, errors.New(message)
		}
		return value, nil
	}
	found["lookup"] = func(string, string, string, string) map[string]interface{} {
		return map[string]interface{}{}
	}
	found["toYaml"] = toYaml
	found["toJson"] = func(value interface{}) string {
		content, err := json.Marshal(value)
		if err != nil {
			return ""
		}
		return string(content)
	}
	found["fromYaml"] = func(text string) map[string]interface{} { return unmarshal(yamlInto, text) }
	found["fromJson"] = func(text string) map[string]interface{} { return unmarshal(json.Unmarshal, text) }
	found["fromYamlArray"] = func(text string) []interface{} {
		var list []interface{}
		if err := yaml.Unmarshal([]byte(text), &list); err != nil {
			return []interface{}{err.Error()}
		}
		return list
	}
	return found
}

func yamlInto(content []byte, into interface{}) error { return yaml.Unmarshal(content, into) }

// unmarshal returns errors under the key Error, as Helm does.
func unmarshal(with func([]byte, interface{}) error, text string) map[string]interface{} {
	result := map[string]interface{}{}
	if err := with([]byte(text), &result); err != nil {
		result["Error"] = err.Error()
	}
	return result
}

func toYaml(value interface{}) string {
	content, err := yaml.Marshal(value)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(content), "\n")
}

type apiVersions map[string]bool

// Has is Capabilities.APIVersions.Has.
func (a apiVersions) Has(version string) bool { return a[version] }

// files are those of a chart outside templates/, with the methods of .Files.
type files map[string][]byte

// Get is empty for a file that there is not.
func (f files) Get(name string) string { return string(f[name]) }

// Glob has the files whose path matches a pattern.
func (f files) Glob(pattern string) files {
	found := files{}
	for name, content := range f {
		if matches, _ := path.Match(pattern, name); matches {
			found[name] = content
		}
	}
	return found
}

// AsConfig is the data of a ConfigMap with these files by their basename.
func (f files) AsConfig() string {
	data := map[string]string{}
	for name, content := range f {
		data[path.Base(name)] = string(content)
	}
	return toYaml(data)
}
